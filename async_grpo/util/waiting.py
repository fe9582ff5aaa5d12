"""Looking again for what will be there soon, and asking again where an answer was lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")
TRIES = 3  # of a turn whose engine was lost, and of a judge that gave no verdict


def poll(*, every_s: float, within_s: float) -> Iterator[None]:
    """Yield for each look; what follows the loop is said of something that did not come in time.

    The first look is at once, however little time there is; the last one is at its end, or after.

    Example:
        >>> looks = 0
        >>> for _ in poll(every_s=60, within_s=0):
        ...     looks += 1
        >>> looks
        1
    """
    deadline = time.monotonic() + within_s
    yield
    while time.monotonic() < deadline:
        time.sleep(every_s)
        yield


async def ask_again(
    ask: Callable[[], Awaitable[T]],
    *,
    lost: type[Exception],
    final: type[Exception] | tuple[type[Exception], ...] = (),
    warn: Callable[[Exception], None],
    pause_s: float = 0.0,
) -> T:
    """The answer of a worker, or of another one; raises the last of `TRIES` errors.

    Args:
        lost: errors after which another worker is asked, once `warn` was told of them.
        final: those among them that are raised at once.
        pause_s: before another worker is asked.
    """
    for _ in range(TRIES - 1):
        try:
            return await ask()
        except final:
            raise
        except lost as error:
            warn(error)
        await asyncio.sleep(pause_s)
    return await ask()
