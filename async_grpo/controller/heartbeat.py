"""How the controller learns that a process is gone: dead, frozen or unreachable.

A worker answers a ping only after the interval, so that a call is always under way: the call fails
at once when the process dies, and misses its deadline when the process is frozen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from async_grpo.cluster import handles
from async_grpo.types import Pulse
from async_grpo.util.errors import AsyncGrpoError, LossCause, ProcessLostError

if TYPE_CHECKING:
    from async_grpo.cluster.handles import WorkerHandle

# Deadlines are counted in ticks, not measured: a controller that was itself frozen, or starved of
# CPU, finds the answers that came meanwhile before it counts another tick.
T = TypeVar("T")
TICKS = 10
GONE_PAUSES_S = (1.0, 0.0)  # after each try: one network failure is no end


class Loss(NamedTuple):
    """Why a worker counts as lost."""

    cause: LossCause
    reason: str


async def until_lost(
    handle: WorkerHandle,
    heard: Callable[[Pulse], None],
    *,
    interval_s: float,
    lease_s: float,
    who: str,
) -> Loss:
    """Return when a worker is lost: it died, or its answer is `lease_s` overdue.

    `heard` gets its pulses.
    """
    clock = asyncio.get_running_loop().time
    while True:
        started = clock()
        ping = asyncio.create_task(_ping(handle, interval_s, who), name=f"ping-{who}")
        try:
            if not await in_ticks(ping, limit_s=interval_s + lease_s):
                return Loss(LossCause.SILENT, f"{who} has not answered for {lease_s:g} s")
            heard(ping.result())
            # A faulty worker that answers at once must not be pinged in a busy loop.
            await asyncio.sleep(started + interval_s - clock())
        except ProcessLostError as error:
            return Loss(LossCause.DIED, str(error))
        except AsyncGrpoError as error:
            return Loss(LossCause.SILENT, str(error))
        finally:
            ping.cancel()


async def until_gone(call: Callable[[], Awaitable[object]], *, who: str) -> str:
    """Wait until a process has ended, and return why; `call()` to it never returns before."""
    reason = f"{who} has ended"
    for pause_s in GONE_PAUSES_S:
        try:
            await handles.call(call(), timeout_s=None, who=who)
        except AsyncGrpoError as error:
            reason = str(error)
        await asyncio.sleep(pause_s)
    return reason


async def in_ticks(awaited: asyncio.Future[T], *, limit_s: float) -> bool:
    """Whether it is done within `limit_s`, not counting time in which this process stood still."""
    for _ in range(TICKS):
        await asyncio.wait({awaited}, timeout=limit_s / TICKS)
        if awaited.done():
            return True
    return False


async def _ping(handle: WorkerHandle, interval_s: float, who: str) -> Pulse:
    # No timeout: the caller counts ticks.
    return await handles.call(handle.ping.remote(interval_s), timeout_s=None, who=who)
