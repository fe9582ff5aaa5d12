"""Items on their way to the ranks: each taken once by every rank, kept until all have it.

A rank asks for item i+1 while it computes item i; it says that it is hungry when it has run dry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from async_grpo.types import StreamItem


class Outbox:
    """Every rank's stream, in lockstep by index."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._items: dict[int, Sequence[StreamItem]] = {}
        self._next = 0  # index of the item that is formed next
        self._asked: dict[int, int] = {}  # rank -> the latest index it asked for
        self._hungry: set[tuple[int, int]] = set()  # (rank, index)
        self._failure: BaseException | None = None
        self._changed = asyncio.Condition()
        self._demand = asyncio.Event()

    @property
    def is_wanted(self) -> bool:
        """Every rank has asked for the item that would be formed next."""
        return len(self._asked) == self._num_ranks and min(self._asked.values()) >= self._next

    @property
    def is_hungry(self) -> bool:
        """At least one rank stands still until the next item comes."""
        return any(index == self._next for _, index in self._hungry)

    async def take(self, rank: int, index: int) -> StreamItem:
        """Item `index` for `rank`, when it exists. Raises the failure of the batcher, if any."""
        self._asked[rank] = max(index, self._asked.get(rank, 0))
        if self.is_wanted:
            self._demand.set()
        async with self._changed:
            await self._changed.wait_for(lambda: index in self._items or self._failure)
        if self._failure is not None:
            raise self._failure
        self._forget(min(self._asked.values()) - 1)
        return self._items[index][rank]

    def mark_hungry(self, rank: int, index: int) -> None:
        self._hungry.add((rank, index))

    def put(self, items: Sequence[StreamItem]) -> None:
        """The next item, one a rank."""
        self._items[self._next] = items
        self._next += 1
        self._hungry = {(rank, index) for rank, index in self._hungry if index >= self._next}
        if not self.is_wanted:
            self._demand.clear()
        self._notify()

    def fail(self, error: BaseException | None) -> None:
        """Nothing more will come: whoever takes an item gets this error."""
        self._failure = self._failure or error
        self._notify()

    async def wait_for_demand(self, *, timeout_s: float) -> None:
        """Return when an item is wanted, or after a moment."""
        try:
            await asyncio.wait_for(self._demand.wait(), timeout_s)
        except TimeoutError:
            return

    def _notify(self) -> None:
        async def wake() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._waking = asyncio.get_running_loop().create_task(wake(), name="outbox-wake")

    def _forget(self, before: int) -> None:
        for index in [index for index in self._items if index < before]:
            del self._items[index]
