"""Who keeps its weights while all others get newer ones, for an evaluation of one version. Pure.

A worker that is held drops out of training by itself: it gets no lease on newer weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from async_grpo.types import WeightsVersion


@dataclass(slots=True, eq=False)
class Hold:
    """For one evaluation; its worker may change when it is lost."""

    version: WeightsVersion  # that is evaluated
    worker_id: str = ""  # empty: training cannot spare one


class Holds:
    """All that are open. Training always has one worker at least that gets its weights."""

    def __init__(self) -> None:
        self._open: list[Hold] = []

    @property
    def workers(self) -> frozenset[str]:
        """Who is held."""
        return frozenset(hold.worker_id for hold in self._open if hold.worker_id)

    def begin(self, version: WeightsVersion, working: Sequence[str]) -> Hold:
        """A hold on the first of `working`, who serve `version`, that can be spared.

        >>> holds, first = Holds(), WeightsVersion(1, 0)
        >>> holds.begin(first, ["a", "b"]).worker_id, holds.begin(first, ["a", "b"]).worker_id
        ('a', '')
        """
        hold = Hold(version, self._spared(working))
        self._open.append(hold)
        return hold

    def end(self, hold: Hold) -> None:
        """It needs its worker no longer."""
        self._open.remove(hold)

    def joined(
        self, worker_id: str, version: WeightsVersion | None, working: Sequence[str]
    ) -> None:
        """A worker has come that serves `version`: a hold for it that has nobody takes this one.

        Engines start one after the other, and a run begins with the first.

        >>> holds, first = Holds(), WeightsVersion(1, 0)
        >>> hold = holds.begin(first, ["a"])
        >>> holds.joined("b", WeightsVersion(1, 1), ["a", "b"])  # newer weights: it is no use
        >>> holds.joined("c", first, ["a", "b", "c"])
        >>> hold.worker_id
        'c'
        """
        for hold in self._open:
            if not hold.worker_id and hold.version == version and self._spared(working):
                hold.worker_id = worker_id
                return

    def review(self, working: Sequence[str]) -> None:
        """Workers have gone: a hold whose worker is lost takes another.

        Where training has no other worker left, it gets the last one back.

        >>> holds = Holds()
        >>> hold = holds.begin(WeightsVersion(1, 0), ["a", "b", "c"])
        >>> holds.review(["b", "c"])
        >>> hold.worker_id
        'b'
        >>> holds.review(["b"])
        >>> hold.worker_id
        ''
        """
        for hold in self._open:
            if hold.worker_id and hold.worker_id not in working:
                hold.worker_id = self._spared(working)
        if working and not set(working) - self.workers:
            for hold in self._open:
                hold.worker_id = ""

    def _spared(self, working: Sequence[str]) -> str:
        free = [name for name in working if name not in self.workers]
        return free[0] if len(free) > 1 else ""
