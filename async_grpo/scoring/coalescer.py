"""Which waiting requests share the reference model's next packed forward. Pure.

Nothing waits for company: when the model is idle, whatever is there goes at once. While it
computes, requests gather, so forwards fill themselves under load.
"""

from __future__ import annotations

from typing import NamedTuple

from async_grpo.types import WeightsVersion


class _Request(NamedTuple):
    num_tokens: int
    version: WeightsVersion


class Coalescer:
    """A line of requests, oldest weights first, then first come first served."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens` of one packed forward."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        self._max_tokens = max_tokens
        self._waiting: dict[int, _Request] = {}  # in order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest_version(self) -> WeightsVersion | None:
        """The weights that the next forward needs; None when nothing waits."""
        return min((request.version for request in self._waiting.values()), default=None)

    def add(self, request_id: int, *, num_tokens: int, version: WeightsVersion) -> None:
        """A request joins the line."""
        if request_id in self._waiting:
            raise ValueError(f"request {request_id} waits already: ids must be unique")
        if not 1 <= num_tokens <= self._max_tokens:
            raise ValueError(
                f"a request must have 1 to max_tokens_per_gpu ({self._max_tokens}) tokens, got "
                f"{num_tokens}: start the logprob worker with a larger --max-tokens-per-gpu"
            )
        self._waiting[request_id] = _Request(num_tokens, version)

    def discard(self, request_id: int) -> bool:
        """Nobody wants the answer any more; False when the request is not waiting."""
        return self._waiting.pop(request_id, None) is not None

    def next_batch(self, *, idle: bool) -> list[int]:
        """The requests of the next forward, removed from the line; empty while the model is busy.

        The first of the queue always goes; later ones with the same weights fill the room left.

        >>> line, version = Coalescer(100), WeightsVersion(0, 0)
        >>> for request_id, num_tokens in enumerate([60, 50, 40]):
        ...     line.add(request_id, num_tokens=num_tokens, version=version)
        >>> line.next_batch(idle=False), line.next_batch(idle=True), line.next_batch(idle=True)
        ([], [0, 2], [1])
        """
        if not idle:
            return []
        version, room, batch = self.oldest_version, self._max_tokens, []
        for request_id, request in self._waiting.items():
            if request.version == version and request.num_tokens <= room:
                batch.append(request_id)
                room -= request.num_tokens
        for request_id in batch:
            del self._waiting[request_id]
        return batch
