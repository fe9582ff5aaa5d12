"""The line of those who asked for a lease that nobody could give yet. Pure but for futures."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from async_grpo.types import Lease, WeightsVersion


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """One request for a lease."""

    number: int  # in the order of asking
    cost: float
    version: WeightsVersion | None
    lease: asyncio.Future[Lease]


class WaitingLine:
    """First come, first served; who waits for weights that nobody serves lets others pass.

    Whether a worker takes more does not depend on the cost, so one refusal speaks for all who want
    the same weights: they stand in a line of their own, of which only the head is looked at.
    """

    def __init__(self) -> None:
        self._lines: dict[WeightsVersion | None, deque[Waiter]] = {}
        self._numbers = itertools.count()

    async def wait(
        self,
        cost: float,
        version: WeightsVersion | None,
        *,
        timeout_s: float,
        moves: Callable[[], int] = int,
    ) -> Lease:
        """A lease, when it is one's turn, or what `end` was given.

        Raises `TimeoutError` when it does not come for `timeout_s` in which `moves` stays the same.
        """
        lease = asyncio.get_running_loop().create_future()
        waiter = Waiter(next(self._numbers), cost, version, lease)
        self._lines.setdefault(version, deque()).append(waiter)
        before = moves()
        try:
            while not (await asyncio.wait({lease}, timeout=timeout_s))[0]:
                if moves() == before:
                    raise TimeoutError
                before = moves()
        finally:
            lease.cancel()  # if it has not come
        return lease.result()

    def serve(self, try_acquire: Callable[[float, WeightsVersion | None], Lease | None], /) -> None:
        """Give leases to as many as can have one now."""
        refused = set[WeightsVersion | None]()
        while (waiter := self._first(refused)) is not None:
            lease = try_acquire(waiter.cost, waiter.version)
            if lease is None:
                refused.add(waiter.version)
            else:
                self._lines[waiter.version].popleft()
                waiter.lease.set_result(lease)

    def end(self, error: Exception) -> None:
        """Nobody need wait any longer: all of them get `error`."""
        for waiter in itertools.chain.from_iterable(self._lines.values()):
            if not waiter.lease.done():
                waiter.lease.set_exception(error)
        self._lines.clear()

    def _first(self, without: Collection[WeightsVersion | None]) -> Waiter | None:
        """Whoever has waited longest, not counting those who have given up."""
        for version in [version for version in self._lines if version not in without]:
            line = self._lines[version]
            while line and line[0].lease.done():
                line.popleft()
            if not line:
                del self._lines[version]
        heads = [line[0] for version, line in self._lines.items() if version not in without]
        return min(heads, key=lambda waiter: waiter.number, default=None)
