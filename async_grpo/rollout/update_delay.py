"""How long the engine delays new weights, for sequences that are about to end.

An update invalidates the KV cache of every running sequence, whose prefix the engine then computes
again. With outputs of like length, which began together and end together, that can be most of a
batch's tokens.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection

SHARE = 0.5  # of the time since the last update: the longest delay
MAX_WAIT_S = 20.0
LOOKS_EVERY_S = 0.01
MEMORY = 64  # requests, of which the median counts


class UpdateDelay:
    """The engine asks it before it loads new weights; it estimates from recent requests.

    A delay costs no throughput while the engine is full, only freshness, so it is bounded. It pays
    off if half of the requests will have ended within `SHARE` of the time since the last update,
    judged by the median duration of recent requests that no update interrupted. It ends when half
    of the sequences have ended, since the batch is then half empty. While sequences are queued a
    delay gains nothing: the next one takes the place of each that ends.
    """

    def __init__(self, *, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._seconds: deque[float] = deque(maxlen=MEMORY)
        self._updated_at: float | None = None

    def ended(self, *, began_at: float) -> None:
        """The engine answered a request that arrived at `began_at` (`time.monotonic`)."""
        if self._updated_at is None or began_at >= self._updated_at:
            self._seconds.append(time.monotonic() - began_at)

    def updated(self) -> None:
        """The engine has just loaded weights."""
        self._updated_at = time.monotonic()

    async def wait(self, began: Collection[float], num_unfinished: Callable[[], int]) -> None:
        """Return when the weights may be loaded.

        Args:
            began: arrival time of each running request.
            num_unfinished: counts sequences, queued ones included.
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
