"""Work beside other work: coroutines of which all are needed, and a thread that may hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def together(work: Iterable[Coroutine[object, object, T]], *, name: str) -> list[T]:
    """What they give, in order; raises the first error, with the rest cancelled."""
    tasks = [asyncio.create_task(each, name=f"{name}-{n}") for n, each in enumerate(work)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def in_background(work: Callable[[], T], *, name: str) -> Future[T]:
    """The future result of `work`, told once all that `work` held is given up.

    A thread that hangs holds up nobody's end.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        nonlocal work
        try:
            result = work()
        except BaseException as error:  # the thread's boundary: whoever waits is told
            outcome.set_exception(error)
        else:
            # A daemon that frees tensors while the interpreter ends would abort the process.
            del work
            outcome.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome
