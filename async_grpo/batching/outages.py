"""Servers of environments that are away: nothing of their type starts or is trained meanwhile.

consumes:     that an episode waits for a server, for as long as it does
produces:     a gate for the groups of the same type of questions; what is told to people
waits for:    nothing
unblocked by: the end of each wait, or its deadline
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from async_grpo.batching.leased_work import Progress
from async_grpo.types import OutageRequest, Problem
from async_grpo.types.roles import ENVIRONMENT
from async_grpo.util.errors import DeadlineError

logger = logging.getLogger(__name__)
SHOWN_INTERVAL_S = 1.0  # an answer to others takes a problem away from the screen


class Outages:
    """By type of question; an episode trained without what it did not need would be a selection."""

    def __init__(self, *, timeout_s: float, progress: Progress) -> None:
        self.told: dict[str, str] = {}  # the first of each type, for people
        self._timeout_s = timeout_s
        self._progress = progress
        self._open = Counter[str | None]()  # None: what belongs to no type never stands still
        self._ended = asyncio.Event()

    def is_open(self, dataset_type: str | None) -> bool:
        return self._open[dataset_type] > 0

    async def over(self, dataset_type: str | None) -> None:
        """Wait until no server of that type is away."""
        while self._open[dataset_type]:
            self._ended.clear()
            await self._ended.wait()

    @contextmanager
    def opened(self, outage: OutageRequest) -> Iterator[None]:
        """The type of questions stands still."""
        if not self._open[outage.dataset_type]:
            self._tell(outage)
        self._open[outage.dataset_type] += 1
        try:
            yield
        finally:
            self._open[outage.dataset_type] -= 1
            self._ended.set()

    async def last(self, outage: OutageRequest) -> None:
        """Until this is cancelled; raises `DeadlineError` when it has lasted for too long."""
        clock = asyncio.get_running_loop().time
        ends = clock() + self._timeout_s
        with self.opened(outage):
            while clock() < ends:
                self._progress.problem = Problem(ENVIRONMENT, outage.why)
                await asyncio.sleep(SHOWN_INTERVAL_S)
        raise DeadlineError(
            f"a server that episodes need must be back within --stall-timeout-s "
            f"{self._timeout_s:g}: {outage.why}; once it is, the same command goes on from the "
            "last checkpoint, or begins again"
        )

    def _tell(self, outage: OutageRequest) -> None:
        whose = f" of type {outage.dataset_type}" if outage.dataset_type else ""
        said = (
            f"a server is away, no question{whose} is begun or trained meanwhile; it is asked "
            f"again for up to --stall-timeout-s {self._timeout_s:g}: {outage.why}"
        )
        logger.warning("%s", said)
        self.told.setdefault(outage.dataset_type, said)
