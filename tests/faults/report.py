"""What became of faults, in lines and in a table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks import results
from faults.books import Books
from faults.experiment import Outcome


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 0.5), percentile([4.0, 1.0, 3.0, 2.0], 0.99)
    (2.0, 4.0)
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def table(outcomes: Sequence[Outcome]) -> str:
    """One line a fault."""
    header = ("fault", "detected", "goes on", "whole", "stood still", "by hand", "books", "orphans")
    rows = [
        (
            str(outcome.fault),
            _seconds(outcome.sight.detected_s),
            _seconds(outcome.sight.goes_on_s),
            _seconds(outcome.sight.whole_s),
            _seconds(outcome.sight.stood_still_s),
            ",".join(outcome.by_hand) or "-",
            "balanced" if outcome.books.are_balanced else "NOT BALANCED",
            str(outcome.orphans),
        )
        for outcome in outcomes
    ]
    return results.table(header, rows)


def line(outcome: Outcome) -> str:
    """One fault in a sentence, as soon as it is over."""
    sight, books = outcome.sight, outcome.books
    parts = [
        f"{outcome.fault}: detected {_seconds(sight.detected_s)} ({sight.by or 'by nobody'})",
        f"goes on {_seconds(sight.goes_on_s)}, whole {_seconds(sight.whole_s)}",
        f"{books.num_batches} batches, lost {books.lost}, doubled {books.doubled}, "
        f"stale {books.stale}, failed {books.failed}, discarded {books.discarded}",
        *(f"PROBLEM: {problem}" for problem in (*outcome.problems, *books.problems[:3])),
        *([f"trainer said: {outcome.last_line}"] if outcome.last_line else []),
    ]
    return "\n    ".join(parts)


def summary(outcomes: Sequence[Outcome]) -> str:
    """How long it took a run to notice, and to be whole again."""
    parts = []
    for name, times in (
        ("detected", [outcome.sight.detected_s for outcome in outcomes]),
        ("recovered", [outcome.recovered_s for outcome in outcomes]),
    ):
        if known := [seconds for seconds in times if seconds is not None]:
            p50, p99 = (percentile(known, share) for share in (0.5, 0.99))
            parts.append(f"{name} in {p50:.1f} s (median), {p99:.1f} s (p99)")
    return f"{len(outcomes)} faults: {', '.join(parts)}"


def write(file: Path, outcomes: Sequence[Outcome], runs: Sequence[Books]) -> None:
    """What `benchmarks.faults` reads: seconds of each fault, and the books of all runs."""
    faults = [
        {
            "fault": f"{outcome.fault.role}: {outcome.fault.action}",
            "detected": outcome.sight.detected_s,
            "whole again": outcome.recovered_s,
        }
        for outcome in outcomes
    ]
    books = {
        "batches": sum(run.num_batches for run in runs),
        **{name: sum(getattr(run, name) for run in runs) for name in ("lost", "doubled", "stale")},
    }
    file.write_text(json.dumps({"faults": faults, "books": books}))


def is_well(outcome: Outcome) -> bool:
    """Whether the run took the fault as it should."""
    recovered = outcome.recovered_s is not None
    return recovered and not outcome.problems and outcome.books.are_balanced


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
