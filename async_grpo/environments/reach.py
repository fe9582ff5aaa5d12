"""Requests to servers that an episode needs: while one is away they are sent again.

consumes:     requests, as functions that send them
produces:     their answers
waits for:    a server that is away; the controller is told, which has the type of questions stand
              still (`batching.outages`)
unblocked by: an answer, or the end of what the controller lets it wait
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from async_grpo.environments.causes import Next, address_of, cause_of, decide, is_repeatable
from async_grpo.util.deadlines import SERVER_PROBE_S
from async_grpo.util.errors import escaped

T = TypeVar("T")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0  # between tries: 0.25, 0.5, 1, ... 5, 5, 5
Tell = Callable[[str], Coroutine[Any, Any, None]]  # of an outage, for as long as it is awaited
TELL: ContextVar[Tell | None] = ContextVar("tell", default=None)  # of the episode that is played


class Outage:
    """A server is away, which everybody knows until `close`."""

    def __init__(self, telling: Coroutine[Any, Any, None]) -> None:
        self._told = asyncio.create_task(telling, name="outage")
        self._pause_s = FIRST_PAUSE_S

    async def pause(self) -> None:
        """Before the next try; raises when nobody may wait any longer."""
        await asyncio.wait({self._told}, timeout=self._pause_s)
        if self._told.done():
            self._told.result()
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def close(self) -> None:
        """It is back, or nobody waits for it any more."""
        self._told.cancel()


async def reach(
    send: Callable[[], Awaitable[T]],
    *,
    is_idempotent: bool = False,
    who: str = "",
    tell: Tell | None = None,
    check: Callable[[Exception], None] = lambda error: None,
) -> T:
    """What `send` gives, which is called again while its server is away.

    Raises the first error that is another one, any where no episode is played, and what `check`
    raises of one before it is sent again.
    """
    tell, outage = tell or TELL.get(), None
    try:
        while True:
            try:
                return await send()
            except Exception as error:  # of the user's code
                may_repeat = is_repeatable(error, is_idempotent=is_idempotent)
                follows = decide(cause_of(error), has_sampled=True, is_repeatable=may_repeat)
                if not tell or follows is not Next.REQUEST:
                    raise
                check(error)
                outage = outage or Outage(tell(escaped(f"{who}{error!r}")))
            await outage.pause()
    finally:
        if outage:
            outage.close()


async def until_back(error: BaseException, tell: Tell) -> None:
    """Wait for the server whose failure was `error`, as long as it refuses to be connected with.

    What was asked of it cannot be asked again from here.
    """
    if address := address_of(error):

        async def connect() -> None:
            async with asyncio.timeout(SERVER_PROBE_S):
                _, writer = await asyncio.open_connection(*address)
            writer.close()

        await reach(connect, is_idempotent=True, who=f"{error!r}: ", tell=tell)
