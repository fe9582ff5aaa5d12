"""The line of those who asked for a lease that nobody could give yet. Pure but for futures."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from async_grpo.types import Lease, WeightsVersion


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """One request for a lease."""

    cost: float
    version: WeightsVersion | None
    lease: asyncio.Future[Lease]


class WaitingLine:
    """First come, first served; who waits for weights that nobody serves lets others pass."""

    def __init__(self) -> None:
        self._waiters: deque[Waiter] = deque()

    async def wait(self, cost: float, version: WeightsVersion | None, *, timeout_s: float) -> Lease:
        """A lease, when it is one's turn; raises `TimeoutError`, or what `end` was given."""
        waiter = Waiter(cost, version, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        return await asyncio.wait_for(waiter.lease, timeout_s)

    def serve(self, try_acquire: Callable[[float, WeightsVersion | None], Lease | None], /) -> None:
        """Give leases to as many as can have one now."""
        waiting, refused = deque[Waiter](), set[WeightsVersion | None]()
        for waiter in self._waiters:
            if waiter.lease.done():  # it has given up
                continue
            # Whether a worker takes more does not depend on the cost: one refusal speaks for all.
            lease = None
            if waiter.version not in refused:
                lease = try_acquire(waiter.cost, waiter.version)
            if lease is not None:
                waiter.lease.set_result(lease)
            else:
                refused.add(waiter.version)
                waiting.append(waiter)
        self._waiters = waiting

    def end(self, error: Exception) -> None:
        """Nobody need wait any longer: all of them get `error`."""
        for waiter in self._waiters:
            if not waiter.lease.done():
                waiter.lease.set_exception(error)
        self._waiters.clear()
