"""Coroutines of which all are needed: one that fails ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Iterable[Coroutine[Any, Any, T]], *, name: str) -> list[T]:
    """What they give, in order; raises the first error, with the rest cancelled."""
    tasks = [asyncio.create_task(each, name=f"{name}-{n}") for n, each in enumerate(work)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
