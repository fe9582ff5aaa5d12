"""How long new weights wait for sequences that are about to end.

An update throws away the caches of all that runs, which must then be computed anew. With outputs of
like length, which began together and end together, that can be most of a batch's tokens.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection

SHARE = 0.5  # of the time since the last update: what tokens may be older for it
MAX_WAIT_S = 20.0
LOOKS_EVERY_S = 0.01
MEMORY = 64  # requests, of which the median counts


class Patience:
    """Waiting costs no work as long as the engine is full, only freshness, so it is bounded.

    It is worth it when half of the requests will have ended after `SHARE` of the time since the
    last update, by what requests took lately that no update interrupted. It ends when half of the
    sequences have ended, since places then stand empty. While sequences stand in line nothing is
    gained: what ends is followed by another.
    """

    def __init__(self, *, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._seconds: deque[float] = deque(maxlen=MEMORY)
        self._updated_at: float | None = None

    def ended(self, *, began_at: float) -> None:
        """A request was answered that came then, by `time.monotonic`, as all times here."""
        if self._updated_at is None or began_at >= self._updated_at:
            self._seconds.append(time.monotonic() - began_at)

    def updated(self) -> None:
        """Weights were loaded just now."""
        self._updated_at = time.monotonic()

    async def wait(self, began: Collection[float], num_unfinished: Callable[[], int]) -> None:
        """Return when the weights may be loaded.

        Args:
            began: when each request that runs came.
            num_unfinished: counts sequences, with those in line.
        """
        num_before, now = num_unfinished(), time.monotonic()
        if self._updated_at is None or not self._seconds or num_before > self._max_num_seqs:
            return
        deadline = now + min(MAX_WAIT_S, SHARE * (now - self._updated_at))
        typical_s = statistics.median(self._seconds)
        if 2 * sum(began_at + typical_s <= deadline for began_at in began) < len(began):
            return
        while 2 * num_unfinished() > num_before and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LOOKS_EVERY_S)
