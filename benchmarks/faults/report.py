"""Outcomes as a table, and as figures that the next run is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import results
from benchmarks.faults.books import Books
from benchmarks.faults.experiment import Outcome
from benchmarks.results import Figure


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


@dataclass(slots=True)
class Tallies:
    """Sums over the runs that took the faults, each counted at its end."""

    lost: int = 0
    doubled: int = 0
    stale: int = 0
    orphans: int = 0
    problems: int = 0

    def add(self, books: Books) -> None:
        """One run's."""
        self.lost += books.lost
        self.doubled += books.doubled
        self.stale += books.stale
        self.problems += len(books.problems)

    @property
    def are_clean(self) -> bool:
        return not (self.lost or self.doubled or self.stale or self.orphans or self.problems)


def figures(outcomes: Sequence[Outcome], tallies: Tallies) -> list[Figure]:
    """What the file holds: of all faults, and of each role."""
    groups: dict[str, list[Outcome]] = {"all roles": list(outcomes)}
    for outcome in outcomes:
        groups.setdefault(outcome.fault.role, []).append(outcome)
    found = [
        Figure("lost", tallies.lost, "samples", goal=0),
        Figure("doubled", tallies.doubled, "samples", goal=0),
        Figure("stale", tallies.stale, "samples", goal=0),
        Figure("orphans", tallies.orphans, "processes", goal=0),
        Figure("not recovered", sum(not is_well(o) for o in outcomes), "faults", goal=0),
    ]
    for name, members in groups.items():
        found.append(Figure(f"{name}: faults injected", len(members), "faults", "higher"))
        found += _times(f"{name}: detected in", [o.sight.detected_s for o in members])
        found += _times(f"{name}: recovered in", [o.recovered_s for o in members])
    return found


def is_well(outcome: Outcome) -> bool:
    """Whether the run took the fault as it should."""
    recovered = outcome.recovered_s is not None
    return recovered and not outcome.problems and outcome.books.are_balanced


def _times(name: str, values: Sequence[float | None]) -> list[Figure]:
    known = [value for value in values if value is not None]
    if not known:
        return []
    spread = (min(known), max(known))
    return [
        Figure(f"{name}, p50", percentile(known, 0.5), "s", spread=spread),
        Figure(f"{name}, p99", percentile(known, 0.99), "s", spread=spread),
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
