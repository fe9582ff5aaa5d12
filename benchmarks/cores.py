"""Which processes do what, on which cores, and how much they compute. Linux only: reads /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import procfs

END_TIMEOUT_S = 10.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """Processes that are started within run on `core`, and so does whatever they start."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def pin(pids: set[int], *, core: int) -> None:
    """Move every thread of running processes to `core`."""
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), {core})


def family(*roots: int) -> set[int]:
    """The processes themselves, whatever they have started, and all of their sessions."""
    table = dict(procfs.processes())
    members = set(roots) | {pid for pid, (_, session) in table.items() if session in roots}
    while True:
        children = {pid for pid, (parent, _) in table.items() if parent in members}
        if children <= members:
            return members & table.keys()
        members |= children


def titled(pids: set[int], title: str) -> set[int]:
    """Those of `pids` whose command line starts with `title`."""
    return {pid for pid in pids if procfs.command_line(pid).startswith(title)}


def cpu_seconds(pids: set[int]) -> float:
    """Seconds on a core so far, of all threads; of processes that have ended, none."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += sum(map(int, procfs.stat(pid)[11:13]))
    return total / TICKS_PER_S


def queued_seconds(pids: set[int]) -> float:
    """Seconds so far in which their threads were ready to run but had no core."""
    nanoseconds = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                schedule = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
                nanoseconds += int(schedule[1])
    return nanoseconds / 1e9


def end(pids: set[int]) -> None:
    """Kill those that still run, and wait until they are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + END_TIMEOUT_S
    while any(map(procfs.is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
