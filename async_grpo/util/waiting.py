"""Waiting: polling, asking again after a loss, awaiting several coroutines, background threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
TRIES = 3  # of a turn whose engine was lost, and of a judge that gave no verdict


def poll(*, every_s: float, within_s: float) -> Iterator[None]:
    """Yield once for each look; the loop ends when the time is up.

    The first look is at once, even with no time left; the last one is at the deadline or after.

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
    """Return an answer after at most `TRIES` tries; raises the last error.

    Args:
        lost: errors after which another worker is asked; `warn` gets each.
        final: the `lost` errors that are raised at once.
        pause_s: seconds before another worker is asked.
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


async def together(work: Iterable[Coroutine[object, object, T]], *, name: str) -> list[T]:
    """Await all coroutines and return their results in order; the first error cancels the rest."""
    tasks = [asyncio.create_task(each, name=f"{name}-{n}") for n, each in enumerate(work)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def forget(answer: asyncio.Future[T]) -> None:
    """Retrieve the error of an answer that is given up: asyncio would log it."""
    if not answer.cancelled():
        answer.exception()


def in_background(work: Callable[[], T], *, name: str) -> Future[T]:
    """Run `work` in a daemon thread; its result comes after everything it held is released.

    A thread that hangs does not delay the end of the process.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        nonlocal work
        try:
            result = work()
        except BaseException as error:  # the thread's boundary: the future carries it
            outcome.set_exception(error)
        else:
            # A daemon that frees tensors while the interpreter ends would abort the process.
            del work
            outcome.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
