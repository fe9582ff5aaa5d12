"""What the processes of a system use while it works, read from /proc: Linux only.

A system writes a row to a file at the end of each step. The watch notes the time and the CPU
seconds of all processes when it sees a new row, in the same way for every system, and looks at
their memory now and then: the sum of their proportional set sizes, in which a shared page counts
once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import procfs
from benchmarks.cores import TICKS_PER_S, family

ROW_INTERVAL_S = 0.1
MEMORY_INTERVAL_S = 3.0  # adding up the pages of a family takes about 0.1 s
ROLES = {  # by what the command line holds; the first that fits
    "VLLM::Engine": "engine core",
    "ray::GenerationWorker": "engine front end",
    "ray::LogprobWorker": "reference",
    "ray::Controller": "controller",
    "ray::VerifierPool": "verifier pool",
    "trainer_core.py": "trainer",
    "trl_train": "trainer",
    "worker_dispatcher.py": "dispatcher",
    "raylet/raylet": "raylet",
    "gcs_server": "gcs",
    "ray::IDLE": "idle Ray workers",
    "dashboard": "Ray agents",
    "runtime_env": "Ray agents",
    "log_monitor": "Ray agents",
    "async_grpo.verification": "verifiers",
    "vllm": "engine front end",
}


@dataclass(frozen=True, slots=True)
class Note:
    """What was so when a row was seen."""

    num_rows: int
    seconds: float  # since the watch began
    cpu_seconds: Mapping[str, float]  # so far, by role


class Watch(threading.Thread):
    """Watches the families of `roots()` until the block ends."""

    def __init__(self, rows: Path, *, roots: Callable[[], tuple[int, ...]]) -> None:
        super().__init__(name="watch", daemon=True)
        self._rows = rows
        self._roots = roots
        self._ended = threading.Event()
        self._began = time.monotonic()
        self._ticks: dict[tuple[int, int], tuple[str, int]] = {}  # of the ended too
        self.notes: list[Note] = []
        self.peak_memory_bytes = 0

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        look_at_memory_at = 0.0
        num_rows = 0
        while not self._ended.wait(ROW_INTERVAL_S):
            seen = count_rows(self._rows)
            if seen > num_rows:
                num_rows = seen
                seconds = time.monotonic() - self._began
                self.notes.append(Note(num_rows, seconds, self._cpu_seconds()))
            if time.monotonic() > look_at_memory_at:
                members = family(*self._roots())
                self.peak_memory_bytes = max(self.peak_memory_bytes, memory_bytes(members))
                look_at_memory_at = time.monotonic() + MEMORY_INTERVAL_S

    def _cpu_seconds(self) -> dict[str, float]:
        for pid in family(*self._roots()):
            with contextlib.suppress(*procfs.GONE):
                fields = procfs.stat(pid)
                born, ticks = int(fields[19]), int(fields[11]) + int(fields[12])
                self._ticks[pid, born] = (role_of(procfs.command_line(pid)), ticks)
        seconds: dict[str, float] = {}
        for role, ticks in self._ticks.values():
            seconds[role] = seconds.get(role, 0.0) + ticks / TICKS_PER_S
        return seconds


def count_rows(file: Path) -> int:
    """Whole lines of a file that may not be there yet."""
    try:
        return file.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def memory_bytes(pids: set[int]) -> int:
    """Proportional set size of all of them together."""
    used = (procfs.usage(pid) for pid in pids)
    return sum(usage.pss_bytes for usage in used if usage is not None)


def role_of(command_line: str) -> str:
    """What a process does for its system.

    >>> role_of("ray::Controller.ask"), role_of("/bin/bash")
    ('controller', 'other')
    """
    return next((role for part, role in ROLES.items() if part in command_line), "other")
