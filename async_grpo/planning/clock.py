"""An event loop whose clock jumps to whatever happens next, and what is busy on it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.DefaultSelector):
    """Instead of waiting for the next timer, the time is moved to it."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits and nothing is scheduled")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """What the coroutine returns; sleeping costs no time.

    >>> async def scenario():
    ...     await asyncio.sleep(3600)
    ...     return asyncio.get_running_loop().time()
    >>> run(scenario())
    3600.0
    """
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(scenario)


class Process:
    """Serves one call after the other, as an actor's event loop does."""

    def __init__(self) -> None:
        self.free_at_s = 0.0
        self.worked_s = 0.0

    async def work(self, seconds: float) -> None:
        """Wait in line, then for `seconds` of the process."""
        now_s = asyncio.get_running_loop().time()
        self.free_at_s = max(self.free_at_s, now_s) + seconds
        self.worked_s += seconds
        if self.free_at_s > now_s:
            await asyncio.sleep(self.free_at_s - now_s)
