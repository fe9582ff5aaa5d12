"""A rank's end of the batcher's stream: fetches one item ahead, and measures the waiting.

consumes:     minibatches and ends of steps, by index
produces:     the same, in order, as an iterator that ends on every rank at the same item
waits for:    the batcher, up to a deadline that names what the pipeline was waiting for
unblocked by: a round going out, a request to stop, the batcher's death
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import ray

from async_grpo import cluster
from async_grpo.errors import BatcherLostError, DeadlineError, ProcessLostError
from async_grpo.types import PipelineStatus, StreamItem

STATUS_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.5  # after which a rank that waits looks whether it is to stop
READY, STOP, LOST = range(3)  # what a rank proposes to the others for its next item


class RankStream(Iterator[StreamItem]):
    """Iterates over the items that every rank gets in the same number and order.

    Ends when any rank has been asked to stop; raises `BatcherLostError` on every rank when one of
    them has lost the batcher, so that none trains an item that another cannot have.
    """

    def __init__(
        self,
        batcher: Any,
        *,
        rank: int,
        stall_timeout_s: float,
        agree: Callable[[int], int] = int,
        stop: Event | None = None,
    ) -> None:
        """`agree` is `Ranks.agree`; the default serves a rank that is alone."""
        self._batcher = batcher
        self._rank = rank
        self._stall_timeout_s = stall_timeout_s
        self._agree = agree
        self._stop = stop or Event()
        self._index = 0
        self._next = batcher.next_item.remote(rank, 0)
        self._seconds_waiting = 0.0
        self.is_stopped = False

    def __next__(self) -> StreamItem:
        started = time.monotonic()
        item, proposal = self._take_next()
        agreed = self._agree(proposal)
        if agreed == LOST:
            raise BatcherLostError("the experience batcher died")
        if agreed == STOP or item is None:
            self.is_stopped = True
            self._stop.set()  # whichever rank was asked, all of them end
            raise StopIteration
        self._index += 1
        self._next = self._batcher.next_item.remote(self._rank, self._index)
        self._seconds_waiting += time.monotonic() - started
        return item

    def take_seconds_waiting(self) -> float:
        """Seconds that this rank has waited since the last call."""
        seconds, self._seconds_waiting = self._seconds_waiting, 0.0
        return seconds

    def _take_next(self) -> tuple[StreamItem | None, int]:
        """The next item, or none when this rank was asked to stop or has lost the batcher."""
        reference = self._next
        if not ray.wait([reference], timeout=0)[0]:
            # Only now is this rank idle: the batcher may send a round that is not full.
            self._batcher.hungry.remote(self._rank, self._index)
        try:
            item = self._wait_while_it_moves(reference)
        except ProcessLostError:
            return None, LOST
        return (None, STOP) if self._stop.is_set() else (item, READY)

    def _wait_while_it_moves(self, reference: Any) -> StreamItem | None:
        """The item; `DeadlineError` when the pipeline has not moved for the stall timeout."""
        before: PipelineStatus | None = None
        while not self._stop.is_set():
            if self._comes(reference):
                item: StreamItem = cluster.wait(
                    reference, timeout_s=STATUS_TIMEOUT_S, who="the experience batcher"
                )
                return item
            now = self._status()
            if before is not None and now.answers == before.answers:
                raise DeadlineError(
                    f"nothing has moved for --stall-timeout-s {self._stall_timeout_s:g}: "
                    f"{_describe(now)}"
                )
            before = now
        return None

    def _comes(self, reference: Any) -> bool:
        """Whether the item is there before the stall timeout, and before a request to stop."""
        deadline = time.monotonic() + self._stall_timeout_s
        while not self._stop.is_set():
            left = deadline - time.monotonic()
            if ray.wait([reference], timeout=min(POLL_INTERVAL_S, max(left, 0.0)))[0]:
                return True
            if left <= 0:
                return False
        return False

    def _status(self) -> PipelineStatus:
        status: PipelineStatus = cluster.wait(
            self._batcher.status.remote(),
            timeout_s=STATUS_TIMEOUT_S,
            who="the experience batcher",
        )
        return status


def _describe(status: PipelineStatus) -> str:
    return status.problem or (
        f"{status.generating} samples generating, {status.verifying} verifying, "
        f"{status.in_reference} in reference, {status.ready} ready; workers: "
        f"{dict(status.workers)}"
    )
