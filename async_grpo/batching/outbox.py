"""Answers on their way to the ranks: each taken once by every rank, kept until all have it.

A rank asks for answer i+1 while it computes answer i; rank 0 says when the ranks have run dry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from async_grpo.types import StreamItems


class Outbox:
    """Every rank's stream, in lockstep by index. What a call costs does not grow with the ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._answers: dict[int, Sequence[StreamItems]] = {}
        self._next = 0  # index of the answer that is formed next
        self._asked = [-1] * num_ranks  # the latest index that each rank asked for
        self._num_asking = 0  # ranks that have asked for the next answer
        self._hungry: set[int] = set()  # indices that the ranks stand still for
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()  # another one after each change
        self._demand = asyncio.Event()

    @property
    def is_wanted(self) -> bool:
        """Every rank has asked for the answer that would be formed next."""
        return self._num_asking == self._num_ranks

    @property
    def is_hungry(self) -> bool:
        """The ranks stand still until the next answer comes."""
        return self._next in self._hungry

    async def take(self, rank: int, index: int) -> StreamItems:
        """Answer `index` for `rank`, when it exists. Raises the failure of the batcher, if any."""
        self._note(rank, index)
        while index not in self._answers and self._failure is None:
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # every rank would add its own to it
        return self._answers[index][rank]

    def replace(self, rank: int, index: int, items: StreamItems) -> None:
        """A rank that asks for the answer again gets these items."""
        answers = [*self._answers[index]]
        answers[rank] = items
        self._answers[index] = answers

    def mark_hungry(self, index: int) -> None:
        if index >= self._next:
            self._hungry.add(index)

    def put(self, answers: Sequence[StreamItems]) -> None:
        """The next answer, one a rank."""
        self._answers[self._next] = answers
        self._hungry.discard(self._next)
        self._next += 1
        self._num_asking = sum(index >= self._next for index in self._asked)
        if not self.is_wanted:
            self._demand.clear()
        self._notify()

    def fail(self, error: BaseException) -> None:
        """Nothing more will come: a rank that takes an answer gets this error."""
        self._failure = self._failure or error
        self._notify()

    async def wait_for_demand(self) -> None:
        """Return when an answer is wanted."""
        await self._demand.wait()

    def _note(self, rank: int, index: int) -> None:
        """A rank asks; when the last one does, no rank needs what was before its latest answer."""
        if index <= self._asked[rank]:
            return
        if self._asked[rank] < self._next <= index:
            self._num_asking += 1
        self._asked[rank] = index
        if self.is_wanted:
            self._demand.set()
            for old in [old for old in self._answers if old < self._next - 1]:
                del self._answers[old]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
