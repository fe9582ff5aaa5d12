"""Whether the run that workers work for still lives: its batcher, and behind it its trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from async_grpo.controller.heartbeat import Loss, until_gone

TRAINER_SILENCE_S = 15.0  # after which a trainer whose batcher has died is taken for dead too
# After which any is that has asked before: a registry that was restarted knows no batcher.
LONG_SILENCE_S = 60.0


class RunWatch:
    """Follows one batcher at a time, and notes when the trainer was heard last."""

    def __init__(self, *, batcher_died: Callable[[str], None]) -> None:
        """`batcher_died` is told why, at once."""
        self._batcher_died = batcher_died
        self._following: asyncio.Task[Loss] | None = None
        self._heard_at = 0.0
        self._asks = False  # the trainer asks again and again

    def follow(self, batcher: Any) -> None:
        """From now on this batcher, an actor; None: there is no run."""
        if self._following is not None:
            self._following.cancel()
        self._following, self._asks = None, False
        if batcher is not None:
            self._following = asyncio.create_task(
                until_gone(batcher, who="the experience batcher"), name="follow-batcher"
            )
            self._following.add_done_callback(self._gone)

    def trainer_heard(self, *, asks: bool = False) -> None:
        """The trainer has said something; with `asks`, it will again in a moment."""
        self._asks = self._asks or asks
        self._heard_at = asyncio.get_running_loop().time()

    @property
    def trainer_died(self) -> bool:
        """It is silent, for longer when it is not known that its batcher has died."""
        batcher_died = self._following is not None and self._following.done()
        silent_s = asyncio.get_running_loop().time() - self._heard_at
        if batcher_died:
            return silent_s > TRAINER_SILENCE_S
        return self._asks and silent_s > LONG_SILENCE_S

    def _gone(self, following: asyncio.Task[Loss]) -> None:
        if not following.cancelled():
            self._batcher_died(following.result().reason)
