"""A rank's end of the batcher's stream: fetches one item ahead, and measures the waiting.

consumes:     minibatches and ends of steps, by index
produces:     the same, in order, as an iterator that never ends by itself
waits for:    the batcher, up to a deadline that names what the pipeline was waiting for
unblocked by: a round going out
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import ray

from async_grpo import cluster
from async_grpo.errors import DeadlineError
from async_grpo.types import PipelineStatus, StreamItem

STATUS_TIMEOUT_S = 10.0


class RankStream(Iterator[StreamItem]):
    """Iterates over the items that every rank gets in the same number and order."""

    def __init__(self, batcher: Any, *, rank: int, stall_timeout_s: float) -> None:
        self._batcher = batcher
        self._rank = rank
        self._stall_timeout_s = stall_timeout_s
        self._index = 0
        self._next = batcher.next_item.remote(rank, 0)
        self._seconds_waiting = 0.0

    def __next__(self) -> StreamItem:
        started = time.monotonic()
        reference, index = self._next, self._index
        if not ray.wait([reference], timeout=0)[0]:
            # Only now is this rank idle: the batcher may send a round that is not full.
            self._batcher.hungry.remote(self._rank, index)
        item = self._wait_while_it_moves(reference)
        self._index = index + 1
        self._next = self._batcher.next_item.remote(self._rank, self._index)
        self._seconds_waiting += time.monotonic() - started
        return item

    def take_seconds_waiting(self) -> float:
        """Seconds that this rank has waited since the last call."""
        seconds, self._seconds_waiting = self._seconds_waiting, 0.0
        return seconds

    def _wait_while_it_moves(self, reference: Any) -> StreamItem:
        """The item; `DeadlineError` when the pipeline has not moved for the stall timeout."""
        before: PipelineStatus | None = None
        while True:
            try:
                item: StreamItem = cluster.wait(
                    reference, timeout_s=self._stall_timeout_s, who="the experience batcher"
                )
                return item
            except DeadlineError:
                now = self._status()
            if before is not None and now.answers == before.answers:
                raise DeadlineError(
                    f"nothing has moved for --stall-timeout-s {self._stall_timeout_s:g}: "
                    f"{_describe(now)}"
                )
            before = now

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
