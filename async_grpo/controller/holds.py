"""Who keeps its weights while all others get newer ones, for an evaluation of one version. Pure.

A worker that is held drops out of training by itself: it gets no lease on newer weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Hold:
    """For one evaluation; its worker may change when it is lost."""

    worker_id: str = ""  # empty: training cannot spare one


class Holds:
    """All that are open. Training always has one worker at least that gets its weights."""

    def __init__(self) -> None:
        self._open: list[Hold] = []

    @property
    def workers(self) -> frozenset[str]:
        """Who is held."""
        return frozenset(hold.worker_id for hold in self._open if hold.worker_id)

    def begin(self, working: Sequence[str]) -> Hold:
        """A hold on the first of `working` that can be spared.

        >>> holds = Holds()
        >>> holds.begin(["a", "b"]).worker_id, holds.begin(["a", "b"]).worker_id
        ('a', '')
        """
        hold = Hold(self._spared(working))
        self._open.append(hold)
        return hold

    def end(self, hold: Hold) -> None:
        """It needs its worker no longer."""
        self._open.remove(hold)

    def review(self, working: Sequence[str]) -> None:
        """Workers have come or gone: a hold whose worker is lost takes another.

        Where training has no other worker left, it gets the last one back.

        >>> holds = Holds()
        >>> hold = holds.begin(["a", "b", "c"])
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
