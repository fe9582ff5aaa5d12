"""What is made of a run: rates over its steady part, and when it reached a reward."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.alternation import ratios
from benchmarks.end_to_end.systems import OURS, Run, Step
from benchmarks.end_to_end.watch import Note
from benchmarks.results import Figure, median

FIRST_COUNTED = 3  # steps before it warm caches, and fill the pipeline of an asynchronous system
THRESHOLD = 0.9
SMOOTHED_STEPS = 5
# Samples/s, ours by the best of TRL; CPU time a sample likewise.
GOALS = {"natural": 2.0, "20M natural with KL": 1.7, "20M fixed with KL": 1.3}
CPU_GOALS = {"20M natural with KL": 0.61}
TIME_GOAL = 0.5  # time to THRESHOLD, ours by TRL's


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one run, between the end of its step FIRST_COUNTED and that of its last counted one."""

    samples_per_s: float
    tokens_per_s: float
    trained_tokens_per_s: float
    cpu_ms_per_sample: float
    busy_cores: float  # share of all cores' time in which they computed for the system
    peak_memory_gib: float
    cpu_s_per_step: Mapping[str, float]  # by role


@dataclass(frozen=True, slots=True)
class Learned:
    """When the mean reward of SMOOTHED_STEPS steps reached the threshold; None: it did not."""

    steps: int | None
    seconds: float | None  # since the end of the first step
    seconds_in_all: float | None  # since the system was started


def rates(run: Run) -> Rates:
    """Steps whose rows were seen between two notes, by the time and CPU between these."""
    first, last = steady(run.notes)
    steps = run.rows[first.num_rows : last.num_rows]
    seconds = last.seconds - first.seconds
    samples = sum(step.samples for step in steps)
    spent = {
        role: (total - first.cpu_seconds.get(role, 0.0)) / len(steps)
        for role, total in last.cpu_seconds.items()
    }
    return Rates(
        samples_per_s=samples / seconds,
        tokens_per_s=sum(step.tokens for step in steps) / seconds,
        trained_tokens_per_s=sum(step.trained_tokens for step in steps) / seconds,
        cpu_ms_per_sample=1e3 * sum(spent.values()) * len(steps) / samples,
        busy_cores=sum(spent.values()) * len(steps) / seconds / (os.cpu_count() or 1),
        peak_memory_gib=run.peak_memory_bytes / 2**30,
        cpu_s_per_step=spent,
    )


def steady(notes: Sequence[Note]) -> tuple[Note, Note]:
    """The notes that bound what is counted.

    Not the last two steps: nothing is generated any more while a system that runs ahead does them.

    >>> notes = [Note(rows, float(rows), {}) for rows in range(1, 11)]
    >>> [note.num_rows for note in steady(notes)]
    [3, 8]
    """
    counted = [note for note in notes if FIRST_COUNTED <= note.num_rows < notes[-1].num_rows - 1]
    if len(counted) < 2:
        raise ValueError(f"a run needs more than {FIRST_COUNTED + 3} steps, saw {len(notes)} rows")
    return counted[0], counted[-1]


def smoothed(rows: Sequence[Step]) -> float:
    """Mean reward of the last SMOOTHED_STEPS steps; 0 while there are fewer."""
    last = rows[-SMOOTHED_STEPS:]
    return statistics.fmean(step.reward for step in last) if len(last) == SMOOTHED_STEPS else 0.0


def has_learned(rows: Sequence[Step]) -> bool:
    """Whether any window of steps reached the threshold."""
    return any(smoothed(rows[:end]) >= THRESHOLD for end in range(SMOOTHED_STEPS, len(rows) + 1))


def learned(run: Run) -> Learned:
    """Counted in steps, and in seconds at which the rows of those steps were seen."""
    for end in range(SMOOTHED_STEPS, len(run.rows) + 1):
        if smoothed(run.rows[:end]) >= THRESHOLD:
            seen = next(note for note in run.notes if note.num_rows >= end)
            return Learned(end, seen.seconds - run.notes[0].seconds, seen.seconds)
    return Learned(None, None, None)


def figures_of(records: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """The file's figures, from the records of all runs; those of one setting and turn are pairs."""
    figures: list[Figure] = []
    settings = dict.fromkeys(r["setting"] for r in records if r["kind"] == "rates")
    for setting in settings:
        chosen = [r for r in records if r["kind"] == "rates" and r["setting"] == setting]
        figures += _rate_figures(setting, chosen)
    return figures + _threshold_figures([r for r in records if r["kind"] == "learned"])


def _rate_figures(setting: str, records: Sequence[Mapping[str, Any]]) -> list[Figure]:
    by_system = _by_system(records)
    figures = []
    for name, runs in by_system.items():
        for key, (what, unit, better) in _RATES.items():
            values = [run[key] for run in runs]
            figures.append(median(f"{setting}, {name}, {what}", values, unit, better=better))
    if OURS not in by_system or len(by_system) < 2:
        return figures
    own = by_system.pop(OURS)
    best = max(by_system, key=lambda name: _middle(by_system[name], "samples_per_s"))
    goals = {"samples_per_s": GOALS, "cpu_ms_per_sample": CPU_GOALS}
    if not _pairs(own, by_system[best], "samples_per_s"):
        return figures
    for key, (what, _, better) in _RATES.items():
        compared = _pairs(own, by_system[best], key)
        title, goal = f"{setting}, {what}, ours / TRL's best", goals.get(key, {}).get(setting)
        figures.append(median(title, compared, "x", better=better, goal=goal))
    # Groups whose rewards are equal have no gradient without KL: TRL trains them.
    shares = [run["trained_tokens_per_s"] / run["tokens_per_s"] for run in own]
    title = f"{setting}, share of its output tokens that ours trains"
    return [*figures, median(title, shares, "fraction", better="higher")]


_RATES: Mapping[str, Any] = {
    "samples_per_s": ("samples", "1/s", "higher"),
    "tokens_per_s": ("output tokens", "1/s", "higher"),
    "trained_tokens_per_s": ("trained tokens", "1/s", "higher"),
    "cpu_ms_per_sample": ("CPU time", "ms/sample", "lower"),
    "busy_cores": ("busy cores", "fraction", "higher"),
    "peak_memory_gib": ("peak memory", "GiB", "lower"),
}


def _threshold_figures(records: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """A system of which a seed missed the threshold has no times, and says so by the count."""
    figures: list[Figure] = []
    reached: dict[str, Sequence[Mapping[str, Any]]] = {}
    for name, runs in _by_system(records).items():
        ended = [run for run in runs if run["steps"] is not None]
        at = f"to reward {THRESHOLD}, {name}"
        share = len(ended) / len(runs)
        figures.append(Figure(f"{at}, seeds that reached it", share, "fraction", "higher"))
        if len(ended) == len(runs):
            reached[name] = ended
            figures += [
                median(f"{at}, steps", [run["steps"] for run in ended], "steps"),
                median(f"{at}, after start-up", [run["seconds"] for run in ended], "s"),
                median(f"{at}, start-up included", [run["seconds_in_all"] for run in ended], "s"),
            ]
    if OURS in reached and len(reached) > 1:
        own = reached.pop(OURS)
        best = min(reached, key=lambda name: _middle(reached[name], "seconds"))
        for key, what in (("seconds", "after start-up"), ("seconds_in_all", "start-up included")):
            title = f"to reward {THRESHOLD}, time {what}, ours / TRL's best"
            if compared := _pairs(own, reached[best], key):
                figures.append(median(title, compared, "x", goal=TIME_GOAL))
    return figures


def _by_system(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for record in sorted(records, key=lambda record: record["turn"]):
        grouped.setdefault(record["system"], []).append(record)
    return grouped


def _middle(runs: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def _pairs(
    own: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], key: str
) -> list[float]:
    """Ratios of the runs of the same turn."""
    theirs = {run["turn"]: run[key] for run in other}
    shared = [run for run in own if run["turn"] in theirs]
    return ratios([run[key] for run in shared], by=[theirs[run["turn"]] for run in shared])


def as_record(kind: str, system: str, setting: str, turn: int, value: Any) -> dict[str, Any]:
    """A run's outcome, as the file of runs keeps it."""
    place = {"kind": kind, "system": system, "setting": setting, "turn": turn}
    return place | asdict(value)
