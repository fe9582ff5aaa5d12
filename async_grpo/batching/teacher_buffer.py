"""How many bytes of teachers' payloads wait in object stores for the ranks. Pure but for asyncio.

The step that trains and the steps after it have half of the room each, so that neither waits for
the other: what is held of the first is fetched as its rounds go out.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter


class TeacherBuffer:
    """Room for payloads; whoever makes more than there is room for waits."""

    def __init__(self, limit_bytes: int, *, step: int = 0, is_whole_step: bool = False) -> None:
        """`step` counts gradient steps of the run; it trains now.

        `is_whole_step`: its rounds go out once all of it is there, so that it always has room.
        """
        self.step = step
        self.seconds_waiting = 0.0  # of all that have waited, since last taken
        self._limit_bytes = limit_bytes
        self._is_whole_step = is_whole_step
        self._held: Counter[int] = Counter()  # bytes by step
        self._changed = asyncio.Condition()

    @property
    def num_bytes(self) -> int:
        """Held by payloads that no rank has fetched."""
        return self._held.total()

    async def hold(self, num_bytes: int, *, step: int) -> None:
        """Return when there is room for so many more, which are held from then on.

        A payload that is larger than all the room has it when nothing else is there; no bytes need
        no room.
        """
        began = time.monotonic()
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_room(num_bytes, step))
            self._held[step] += num_bytes
        self.seconds_waiting += time.monotonic() - began

    async def release(self, num_bytes: int, *, step: int) -> None:
        """So many are fetched, or dropped."""
        async with self._changed:
            self._held[step] -= num_bytes
            self._changed.notify_all()

    async def step_ended(self) -> None:
        """The next step trains."""
        async with self._changed:
            self._held += Counter()  # forget what is 0
            self.step += 1
            self._changed.notify_all()

    def take_seconds_waiting(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds_waiting = self.seconds_waiting, 0.0
        return seconds

    def _has_room(self, num_bytes: int, step: int) -> bool:
        if step <= self.step:
            if self._is_whole_step:
                return True
            held = sum(amount for other, amount in self._held.items() if other <= self.step)
        else:
            held = sum(amount for other, amount in self._held.items() if other > self.step)
        return 0 in (held, num_bytes) or held + num_bytes <= self._limit_bytes // 2
