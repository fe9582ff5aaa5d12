"""How a registry learns that somebody is gone: dead, frozen or unreachable.

A worker answers a ping only after the interval, so that one call is always under way: the end of
its process ends the call at once, and a process that is frozen lets its lease run out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from async_grpo import cluster
from async_grpo.errors import AsyncGrpoError, DeadlineError, ProcessLostError
from async_grpo.types import Pulse

# A deadline is counted in ticks instead of measured: a registry that was itself frozen, or starved
# of its CPU, finds the answers that have come meanwhile before it has counted another tick.
TICKS = 10
GONE_INTERVAL_S = 1.0
GONE_TIMEOUT_S = 30.0
GONE_TRIES = 2  # the network may fail once


class Loss(NamedTuple):
    """Why somebody counts as lost."""

    cause: str  # "died", "silent"
    reason: str


async def until_lost(
    handle: Any, heard: Callable[[Pulse], None], *, interval_s: float, lease_s: float, who: str
) -> Loss:
    """Return when a worker is lost: it died, or it has owed its answer for `lease_s`.

    `heard` is told its answers.
    """
    clock = asyncio.get_running_loop().time
    while True:
        started = clock()
        ping = asyncio.create_task(_ping(handle, interval_s, who), name=f"ping-{who}")
        try:
            if not await _in_ticks(ping, limit_s=interval_s + lease_s):
                return Loss("silent", f"{who} has not answered for {lease_s:g} s")
            heard(ping.result())
            # A worker that answers at once, against the rules, is not asked without a pause.
            await asyncio.sleep(started + interval_s - clock())
        except ProcessLostError as error:
            return Loss("died", str(error))
        except AsyncGrpoError as error:
            return Loss("silent", str(error))
        finally:
            ping.cancel()


async def until_gone(handle: Any, *, who: str) -> Loss:
    """Return when the process of an actor has ended; one that is slow or frozen is not gone."""
    failures = 0
    while True:
        try:
            await cluster.call(handle.__ray_ready__.remote(), timeout_s=GONE_TIMEOUT_S, who=who)
            failures = 0
        except DeadlineError:
            continue
        except AsyncGrpoError as error:
            failures += 1
            if failures == GONE_TRIES:
                return Loss("died", str(error))
        await asyncio.sleep(GONE_INTERVAL_S)


async def _ping(handle: Any, interval_s: float, who: str) -> Pulse:
    # Its own deadline is the caller's count of ticks.
    pulse: Pulse = await cluster.call(handle.ping.remote(interval_s), timeout_s=None, who=who)
    return pulse


async def _in_ticks(task: asyncio.Task[Pulse], *, limit_s: float) -> bool:
    for _ in range(TICKS):
        done, _pending = await asyncio.wait({task}, timeout=limit_s / TICKS)
        if done:
            return True
    return False
