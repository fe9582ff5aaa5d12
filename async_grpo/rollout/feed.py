"""Updates on their way from the trainer's calls into a load that takes them one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from async_grpo.errors import WeightSyncError


class UpdateFeed:
    """Whoever puts an update waits until it has been loaded."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._wanted = asyncio.Event()

    async def until_wanted(self, load: asyncio.Task[Any]) -> None:
        """Return when `load` asks for its first update.

        Raises what ended it instead, `WeightSyncError` when it has ended without an error.
        """
        wanted = asyncio.create_task(self._wanted.wait(), name="first-update-is-wanted")
        await asyncio.wait({wanted, load}, return_when=asyncio.FIRST_COMPLETED)
        wanted.cancel()
        if load.done():
            load.result()
            raise WeightSyncError(
                "weights must be newer than those that are served: send later ones"
            )

    async def put(self, update: dict[str, Any]) -> None:
        """Hand over one update; returns when it has been loaded."""
        await self._queue.put(update)
        await self._queue.join()

    def close(self) -> None:
        """There are no more."""
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        self._wanted.set()
        while (update := await self._queue.get()) is not None:
            yield update
            self._queue.task_done()
