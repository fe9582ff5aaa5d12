"""Speeds and lengths of a run, by peaks, files or earlier runs; with them the work of any split.

Rates are fitted to the metrics of earlier runs: first by least squares on the rows, then by
simulating each run and correcting the rates until its simulation is busy for as long as the run
was. The simulation has the run's processes share its cores, so the rates are those of whole cores.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from async_grpo.batching.packing import estimate_cost
from async_grpo.planning.asked import Asked, Split
from async_grpo.planning.prediction import Work, predict
from async_grpo.planning.rates import (
    Layout,
    Lengths,
    LogNormal,
    MeasuredLengths,
    Rates,
    assumed_lengths,
    from_peaks,
    given,
    measured_lengths,
    slower,
)
from async_grpo.util.errors import ConfigError
from async_grpo.util.run_folder import METRICS_FILE

ASSUMED_PROMPT = 200
FIRST_ROW = 2  # the rows before have the cost of the start: compiling, filling the window
LEAST_ROWS = 3
MAX_SAMPLES = 20_000  # the newest, whose lengths are read
CORRECTIONS, CLOSE = 12, 0.01  # most corrections of rates; relative error at which they end
# A weak prior for runs that do not tell an engine's constant from its cost for each sequence: at so
# many sequences the two are equal.
PRIOR_SEQS, PRIOR_WEIGHT = 20.0, 0.1
Row = Mapping[str, Any]  # of training_metrics.jsonl


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSources:
    """The sources of rates beside the peaks of devices."""

    runs: tuple[EarlierRun, ...] = ()
    given: Mapping[str, object] = field(default_factory=dict)  # tables of `file`
    file: str = ""


def layout_of(asked: Asked, split: Split) -> Layout:
    """The split's layout on machines: ranks fill the first ones, engines the others."""
    a_node = asked.fleet.of_a_node
    is_one = asked.on_cpu or len(asked.fleet.nodes) == 1
    return Layout(
        engine_devices=asked.engine_devices,
        num_ranks=split.ranks,
        shard_ranks=asked.shard_ranks(split.ranks),
        engine_nodes=0 if is_one else -(-split.engines * asked.engine_devices // a_node),
        train_nodes=-(-split.ranks // a_node) if not asked.on_cpu else 1,
        train_bytes=asked.train_bytes,
        engine_bytes=asked.worker_bytes(asked.generation),
        published=asked.published,
        by_store=asked.train.memory.weight_transport == "object_store",
    )


def rates_at(asked: Asked, sources: RateSources, split: Split) -> Rates:
    """The rates of a split by peaks, replaced by what runs measured and what a file gives."""
    rates = from_peaks(asked.model, asked.fleet.kind, layout_of(asked, split))
    if sources.runs:
        rates = rates_of(sources.runs, rates)
    return given(rates, sources.given, who=sources.file)


def work_of(asked: Asked, sources: RateSources, lengths: Lengths) -> Callable[[Split], Work]:
    """A function that gives the work of a split; measured rates are the same for all splits."""
    contributing = fmean([measured_step(run).contributing for run in sources.runs] or [1.0])
    fixed = rates_at(asked, sources, asked.own_split) if sources.runs else None

    @cache
    def work(split: Split) -> Work:
        rates = fixed or rates_at(asked, sources, split)
        return Work(asked=asked, rates=rates, lengths=lengths, contributing=contributing)

    return work


def lengths_of(
    asked: Asked, sources: RateSources, *, output_tokens: float = 0.0, prompt_tokens: int = 0
) -> Lengths:
    """Lengths as given, as the newest of the runs had them, or assumed.

    Raises `ConfigError` for a mean output above --max-generation-tokens.
    """
    train = asked.train
    if output_tokens > train.sampling.max_generation_tokens:
        raise ConfigError(
            f"--output-tokens must be at most --max-generation-tokens "
            f"({train.sampling.max_generation_tokens}), got {output_tokens:g}: lower it"
        )
    if sources.runs and not output_tokens:
        found = sources.runs[-1].lengths
        found = replace(found, prompt=prompt_tokens or found.prompt)
        return _cut(found, longest=train.batching.max_tokens_per_gpu - found.prompt)
    prompt = prompt_tokens or (sources.runs[-1].lengths.prompt if sources.runs else ASSUMED_PROMPT)
    prompt = min(
        prompt, max(1, train.batching.max_tokens_per_gpu - train.sampling.max_generation_tokens)
    )
    return assumed_lengths(
        longest=train.sampling.max_generation_tokens, prompt=prompt, mean=output_tokens
    )


def _cut(lengths: Lengths, *, longest: int) -> Lengths:
    """The lengths with outputs cut to `longest` tokens, as a run cuts what no minibatch holds."""
    outputs = lengths.outputs
    if isinstance(outputs, LogNormal):
        return replace(lengths, outputs=replace(outputs, longest=min(outputs.longest, longest)))
    groups = tuple(tuple(min(each, longest) for each in group) for group in outputs.groups)
    return replace(lengths, outputs=MeasuredLengths(groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """Means over the gradient steps of a run, in seconds of one step."""

    generating_s: float
    scoring_s: float
    training_s: float
    gathering_s: float
    sync_s: float
    pause_s: float
    contributing: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRun:
    """An earlier run of the same model, with its metrics."""

    name: str
    asked: Asked
    rows: tuple[Row, ...]
    lengths: Lengths


def read_rows(folder: Path) -> tuple[Row, ...]:
    """The rows of a run's metrics after its start; raises `ConfigError` if they are too few."""
    file = folder / METRICS_FILE
    try:
        lines = file.read_text().split("\n")[:-1]
    except OSError as error:
        raise ConfigError(
            f"--from-run must be the folder of a run, {file} cannot be read ({error.strerror}): "
            "name one that `async-grpo launch` has made"
        ) from None
    rows = tuple(json.loads(line) for line in lines)[FIRST_ROW:]
    if len(rows) < LEAST_ROWS:
        raise ConfigError(
            f"--from-run {folder} must hold {FIRST_ROW + LEAST_ROWS} gradient steps at least, got "
            f"{len(lines)}: let it run longer"
        )
    return rows


def read_lengths(folder: Path, rows: Sequence[Row], *, dump: str) -> Lengths:
    """Output tokens of a run's groups; if samples were not dumped, the mean alone."""
    prompt = fmean(row["avg_prompt_tokens"] for row in rows)
    groups: dict[tuple[int, int], list[int]] = {}
    for line in _last_lines(folder / dump) if dump else ():
        sample = json.loads(line)
        if not sample.get("given") and sample.get("fate") != "failed":
            key = sample["ordinal"], sample["attempt"]
            groups.setdefault(key, []).append(sample["num_output_tokens"])
    if not groups:
        groups = {(0, 0): [round(fmean(row["avg_output_tokens"] for row in rows))]}
    return measured_lengths([*groups.values()], prompt=prompt, source=f"measured in {folder}")


def _last_lines(file: Path) -> Iterator[str]:
    if file.exists():
        with file.open() as lines:
            count = sum(1 for _ in lines)
            lines.seek(0)
            yield from itertools.islice(lines, max(0, count - MAX_SAMPLES), None)


def measured_step(run: EarlierRun) -> MeasuredStep:
    """Means over the rows of a run."""
    engines = run.asked.own_split.engines

    def of(name: str) -> float:
        return fmean(float(row.get(name) or 0.0) for row in run.rows)

    def busy(idle: str) -> float:
        found = [(row["seconds"], row.get(idle)) for row in run.rows]
        return fmean(s * (1 - share) for s, share in found if share is not None)

    scored = [row for row in run.rows if row.get("reference_idle_fraction") is not None]
    total = of("num_samples")
    return MeasuredStep(
        generating_s=busy("generator_idle_fraction") if engines else 0.0,
        scoring_s=busy("reference_idle_fraction") if scored and run.asked.scorers else 0.0,
        training_s=fmean(map(_training_s, run.rows)),
        gathering_s=of("seconds_publishing"),
        sync_s=of("sync_seconds"),
        pause_s=of("sync_pause_seconds"),
        contributing=min(1.0, of("trained_samples") / total) if total else 1.0,
    )


def _training_s(row: Row) -> float:
    stalls = ("seconds_waiting", "seconds_publishing", "seconds_checkpointing")
    return max(1e-6, row["seconds"] - sum(row.get(each) or 0.0 for each in stalls))


def rates_of(runs: Sequence[EarlierRun], rates: Rates) -> Rates:
    """`rates` with those of engines, ranks, scorers and weights as the runs measured them."""
    seen, (constant, per_sequence, running) = [*map(measured_step, runs)], _engine(runs)
    measured = ["engine", "trainer", "sync", *["scorer"] * any(each.scoring_s for each in seen)]
    source = f"measured in {' and '.join(run.name for run in runs)}"
    peak = rates.engine.step_s + rates.engine.per_sequence_s * running
    scale = (constant + per_sequence * running) / peak
    pause = fmean(each.pause_s for each in seen)
    found = replace(
        rates,
        engine=replace(
            rates.engine,
            step_s=constant,
            per_sequence_s=per_sequence,
            per_kv_token_s=0.0,
            per_prefill_token_s=rates.engine.per_prefill_token_s * scale,
        ),
        trainer=replace(rates.trainer, cost_per_second=_trainer(runs, rates), round_floor_s=0.0),
        sync=replace(
            rates.sync,
            gather_s=fmean(each.gathering_s for each in seen),
            transfer_s=max(0.0, fmean(each.sync_s for each in seen) - pause),
            load_s=pause,
        ),
        sources={**rates.sources, **dict.fromkeys(measured, source)},
    )
    for _ in range(CORRECTIONS):
        by = _factors(found, runs, seen)
        slowed = {name: slower(getattr(found, name), by[name]) for name in by}
        found = replace(found, **slowed)
        if max(abs(factor - 1) for factor in by.values()) < CLOSE:
            break
    return found


def _factors(
    rates: Rates, runs: Sequence[EarlierRun], seen: Sequence[MeasuredStep]
) -> dict[str, float]:
    """The square root of the factor by which each role was busy longer than in simulations."""
    factors: dict[str, list[float]] = {"engine": [], "trainer": [], "scorer": []}
    for run, real in zip(runs, seen, strict=True):
        bound = run.asked.train.sampling.max_staleness
        work = Work(
            asked=run.asked, rates=rates, lengths=run.lengths, contributing=real.contributing
        )
        found = predict(work, run.asked.own_split, max_staleness=bound)
        factors["engine"].append(real.generating_s / found.generating_s)
        factors["trainer"].append(real.training_s / (found.training_s + found.optimizer_s))
        if real.scoring_s and found.scoring_s:
            factors["scorer"].append(real.scoring_s / found.scoring_s)
    return {
        # The root, a half correction: a batch that waits for another may gain more than engines do.
        name: float(np.exp(np.mean(np.log(of_runs)) / 2)) if of_runs else 1.0
        for name, of_runs in factors.items()
    }


def _engine(runs: Sequence[EarlierRun]) -> tuple[float, float, float]:
    """(constant, for each sequence, mean sequences) of an engine's step, in seconds.

    By Little's law a running sequence has a token every (sample-seconds / tokens) seconds. That is
    the time of a step, to which least squares fit constant + per sequence * running.
    """
    points = [point for run in runs for point in _engine_points(run)]
    running, step = np.array(points).T
    weight = PRIOR_WEIGHT * len(points)
    rows = np.stack([np.ones_like(running), running], axis=1)
    prior = np.array([[1.0, -PRIOR_SEQS]]) * np.sqrt(weight)
    left = np.concatenate([rows, prior])
    (constant, each), *_ = np.linalg.lstsq(left, np.append(step, 0.0), rcond=None)
    if constant <= 0 or each <= 0:
        each = float(np.mean(step / (PRIOR_SEQS + running)))
        constant = PRIOR_SEQS * each
    return float(constant), float(each), float(np.mean(running))


def _engine_points(run: EarlierRun) -> Iterator[tuple[float, float]]:
    """(running sequences of an engine, seconds of its step) of each row."""
    split = run.asked.own_split
    capacity = run.asked.workers[run.asked.generation].capacity
    for row in run.rows:
        idle, waiting = row.get("generator_idle_fraction"), row.get("avg_generating_samples")
        tokens = (row.get("avg_output_tokens") or 0) * row["num_samples"]
        if idle is None or not waiting or idle >= 1 or not tokens:
            continue
        busy_s = row["seconds"] * (1 - idle)
        running = max(1.0, min(waiting / (1 - idle) / split.engines, capacity))
        yield running, busy_s * running * split.engines / tokens


def _trainer(runs: Sequence[EarlierRun], rates: Rates) -> float:
    """The cost that one rank trains in a second, in units of one token's products."""
    spent = done = 0.0
    ratio, overhead_s = rates.trainer.attention_ratio, rates.trainer.round_overhead_s
    for run in runs:
        ranks = run.asked.own_split.ranks
        for row in run.rows:
            samples = row.get("trained_samples") or 0
            if not samples:
                continue
            tokens = round(row["trained_tokens"] / samples + row["avg_prompt_tokens"])
            rounds = (row.get("num_minibatches") or ranks) / ranks
            spent += max(1e-6, _training_s(row) - rounds * overhead_s - rates.trainer.step_s)
            done += samples * estimate_cost(tokens, attention_ratio=ratio) / ranks
    return done / spent if done else rates.trainer.cost_per_second
