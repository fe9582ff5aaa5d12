"""Killable verifier processes: whatever a text or an adapter does, grading goes on.

sample --one task an adapter--> line --slots--> outcomes, an accident tried again--> best verdict

A slot's thread takes one task after the other from the line, as long as there are any: the event
loop is not asked in between, and hears of outcomes when it comes to it, of many at once.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from async_grpo.types import Verdict
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.slot import Slot
from async_grpo.verification.spawner import Spawner
from async_grpo.verification.verdict import Outcome, best_verdict, is_settled, settle

PATIENCE_S = 0.5  # a task that takes longer makes room for another
LOOKS_EVERY_S = 0.1
MAX_LATE = 2  # such tasks at a time, for each process of the configuration


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """One sample for one adapter, and who waits for its outcome."""

    name: str
    sample: dict[str, Any]
    control: dict[str, Any] | None  # see `Slot.grade`
    outcome: asyncio.Future[Outcome]


class Sandbox:
    """Grades samples with every adapter of the configuration, in `num_processes` processes.

    A task that is not done after `PATIENCE_S` keeps its process until its time is up, while a spare
    one takes its place: what hangs delays nobody else.
    """

    def __init__(self, config: VerifierConfig, *, num_processes: int) -> None:
        self._config = config
        self._num_processes = num_processes
        self._spawner = Spawner()
        self._slots = [Slot(config, self._spawner) for _ in range(num_processes)]
        self._idle = list(self._slots)  # the warmest last
        self._line: deque[_Task] = deque()
        self._working: set[Slot] = set()  # a thread works with them, or mends them
        self._lock = threading.Lock()  # of the next two
        self._done: list[tuple[_Task, Outcome]] = []  # not told yet
        self._is_telling = False  # the loop will come for them
        self._num_late = 0
        self._watch: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._controls: dict[str, dict[str, Any]] = {}  # by adapter, the first sample it graded
        self._events: Counter[str] = Counter()
        most = max(num_processes, os.cpu_count() or 1)  # after any `resize`
        self._threads = ThreadPoolExecutor(most * (1 + MAX_LATE), thread_name_prefix="verifier")

    @property
    def events(self) -> dict[str, int]:
        """What went wrong since the start, by kind: see `Slot.events`, and how it was mended."""
        seen = self._events.copy()
        for slot in self._slots:  # of those that work what they have met so far
            seen.update(dict(slot.events))  # a copy: their threads count on
        return dict(seen) | {"zygote_restarts": self._spawner.num_restarts}

    @property
    def num_up(self) -> int:
        """Slots that have a process."""
        return sum(slot.is_up if slot in self._idle else slot.has_process for slot in self._slots)

    @property
    def is_confined(self) -> bool:
        """Whether the processes live in namespaces of their own."""
        return any(slot.is_confined for slot in self._slots)

    async def start(self) -> None:
        """Start every process; raises `ConfigError` when the adapters cannot be imported."""
        first, *others = self._slots
        await asyncio.to_thread(first.start)  # alone: what is wrong is wrong for all
        await asyncio.gather(*(asyncio.to_thread(slot.start) for slot in others))

    async def resize(self, num_processes: int) -> None:
        """Grade in so many processes from now on; what runs is not disturbed."""
        more = [
            Slot(self._config, self._spawner) for _ in range(num_processes - self._num_processes)
        ]
        await asyncio.gather(*(asyncio.to_thread(slot.try_start) for slot in more))
        self._num_processes = num_processes
        self._slots += more
        self._idle += more
        while len(self._idle) > max(0, num_processes - len(self._working) + self._num_late):
            slot = self._idle.pop(0)
            self._collect(slot)
            self._slots.remove(slot)
            self._threads.submit(slot.stop)
        self._hand_out()

    async def grade(self, sample: dict[str, Any]) -> Verdict:
        """Run every adapter on the sample, side by side, and keep the best verdict."""
        started = time.perf_counter()
        outcomes = await self._outcomes(sample)
        return best_verdict(outcomes, seconds=time.perf_counter() - started)

    async def grade_with_each(self, sample: dict[str, Any]) -> tuple[Verdict, ...]:
        """The verdict of every adapter alone."""
        outcomes = await self._outcomes(sample)
        return tuple(best_verdict([outcome], seconds=0.0) for outcome in outcomes)

    async def _outcomes(self, sample: dict[str, Any]) -> list[Outcome]:
        names = self._config.reward_names
        return await asyncio.gather(*(self._grade_with(name, sample) for name in names))

    async def close(self) -> None:
        """End every process; nothing can be graded afterwards."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._spawner.close)
        for slot in self._idle:
            slot.stop()

    async def _grade_with(self, name: str, sample: dict[str, Any]) -> Outcome:
        attempts: list[Outcome] = []
        while not is_settled(attempts):
            self._events["retried"] += bool(attempts)
            has_overrun = any(attempt.status == "overrun" for attempt in attempts)
            control = self._controls.get(name) if has_overrun else None
            attempts.append(await self._attempt(name, sample, control))
        if attempts[-1].status in ("scored", "unscorable"):
            self._controls.setdefault(name, sample)
        return settle(attempts)

    async def _attempt(
        self, name: str, sample: dict[str, Any], control: dict[str, Any] | None
    ) -> Outcome:
        task = _Task(name, sample, control, asyncio.get_running_loop().create_future())
        self._line.append(task)
        self._hand_out()
        return await task.outcome

    def _hand_out(self) -> None:
        """Set slots to work while tasks wait; those that are late count for none."""
        loop = asyncio.get_running_loop()
        while self._line and len(self._working) - self._num_late < self._num_processes:
            slot = self._idle.pop() if self._idle else self._spare()
            self._working.add(slot)
            work = loop.run_in_executor(self._threads, self._work, slot, loop)
            work.add_done_callback(partial(self._mend, slot))
        if self._working and self._watch is None:
            self._watch = loop.call_later(PATIENCE_S, self._look_for_late_ones)

    def _work(self, slot: Slot, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: the tasks of the line, until there is none or the slot needs mending."""
        while not slot.is_late and not self._is_closed:
            try:
                task = self._line.popleft()
            except IndexError:
                return
            slot.busy_since = time.monotonic()
            try:
                outcome = slot.grade(task.name, task.sample, control=task.control)
            except Exception as error:  # the thread's boundary: whoever waits is told
                loop.call_soon_threadsafe(_fail, task, error)
                raise
            finally:
                slot.busy_since = None
            with self._lock:
                self._done.append((task, outcome))
                is_expected, self._is_telling = self._is_telling, True
            if not is_expected:
                loop.call_soon_threadsafe(self._tell)
            if not slot.has_process:
                return

    def _tell(self) -> None:
        """Whoever waits for an outcome that is known."""
        with self._lock:
            done, self._done, self._is_telling = self._done, [], False
        for task, outcome in done:
            if not task.outcome.done():
                task.outcome.set_result(outcome)

    def _look_for_late_ones(self) -> None:
        """Each makes room for another; see `PATIENCE_S`."""
        now = time.monotonic()
        for slot in self._working:
            is_slow = slot.busy_since is not None and now - slot.busy_since >= PATIENCE_S
            if is_slow and not slot.is_late and self._num_late < MAX_LATE * self._num_processes:
                self._num_late += 1
                slot.is_late = True
        self._watch = None
        if self._working and not self._is_closed:
            loop = asyncio.get_running_loop()
            self._watch = loop.call_later(LOOKS_EVERY_S, self._look_for_late_ones)
        self._hand_out()

    def _spare(self) -> Slot:
        slot = Slot(self._config, self._spawner)
        self._slots.append(slot)
        return slot

    def _mend(self, slot: Slot, work: asyncio.Future[None]) -> None:
        """Have a process again before the slot counts as free."""
        self._collect(slot)
        if slot.has_process or self._is_closed:
            self._release(slot)
            return
        start = asyncio.get_running_loop().run_in_executor(self._threads, slot.try_start)
        start.add_done_callback(lambda _: self._release(slot))

    def _collect(self, slot: Slot) -> None:
        self._events.update(slot.events)
        slot.events.clear()

    def _release(self, slot: Slot) -> None:
        self._collect(slot)
        self._working.discard(slot)
        if slot.is_late:
            slot.is_late = False
            self._num_late -= 1
            self._events["late"] += 1
        if len(self._idle) < self._num_processes:
            self._idle.append(slot)
        else:
            self._slots.remove(slot)
            if not self._is_closed:
                self._threads.submit(slot.stop)
        if not self._is_closed:
            self._hand_out()


def _fail(task: _Task, error: Exception) -> None:
    if not task.outcome.done():
        task.outcome.set_exception(error)
