"""Killable verifier processes: whatever a text or an adapter does, grading goes on.

sample --one task an adapter--> slots --outcomes, an accident retried once--> best verdict
"""

from __future__ import annotations

import asyncio
import queue
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from async_grpo.types import Verdict
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.slot import Slot
from async_grpo.verification.verdict import Outcome, best_verdict, settle

NUM_ATTEMPTS = 2


class Sandbox:
    """Grades samples with every adapter of the configuration, in `num_processes` processes."""

    def __init__(self, config: VerifierConfig, *, num_processes: int) -> None:
        self._config = config
        self._slots = tuple(Slot(config) for _ in range(num_processes))
        self._free: queue.LifoQueue[Slot] = queue.LifoQueue()  # the warmest first
        for slot in self._slots:
            self._free.put(slot)
        # A thread for each slot: whoever has a thread finds a slot, and only waits for a pipe.
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="verifier")

    async def start(self) -> None:
        """Start every process; raises `ConfigError` when the adapters cannot be imported."""
        first, *others = self._slots
        await asyncio.to_thread(first.start)  # alone: what is wrong is wrong for all
        await asyncio.gather(*(asyncio.to_thread(slot.start) for slot in others))

    async def grade(self, sample: dict[str, Any]) -> Verdict:
        """Run every adapter on the sample, side by side, and keep the best verdict."""
        started = time.perf_counter()
        names = self._config.reward_names
        outcomes = await asyncio.gather(*(self._grade_with(name, sample) for name in names))
        return best_verdict(outcomes, seconds=time.perf_counter() - started)

    async def close(self) -> None:
        """End every process; nothing can be graded afterwards."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*(asyncio.to_thread(slot.stop) for slot in self._slots))

    async def _grade_with(self, name: str, sample: dict[str, Any]) -> Outcome:
        loop = asyncio.get_running_loop()
        attempts: list[Outcome] = []
        while len(attempts) < NUM_ATTEMPTS:
            attempts.append(await loop.run_in_executor(self._threads, self._attempt, name, sample))
            if attempts[-1].status in ("scored", "unscorable"):
                break
        return settle(attempts)

    def _attempt(self, name: str, sample: dict[str, Any]) -> Outcome:
        slot = self._free.get()
        try:
            return slot.grade(name, sample)
        finally:
            self._free.put(slot)
