"""Which processes do what, on which cores, and how much they compute. Linux only: reads /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

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
    table = {pid: stat for pid, stat in _processes()}
    members = set(roots) | {pid for pid, (_, session) in table.items() if session in roots}
    while True:
        children = {pid for pid, (parent, _) in table.items() if parent in members}
        if children <= members:
            return members & table.keys()
        members |= children


def titled(pids: set[int], title: str) -> set[int]:
    """Those of `pids` whose command line starts with `title`."""
    return {pid for pid in pids if _command_line(pid).startswith(title)}


def cpu_seconds(pids: set[int]) -> float:
    """Seconds on a core so far, of all threads; of processes that have ended, none."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += sum(map(int, _stat(pid)[11:13]))
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
    while any(map(_is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    """False for a zombie too: it only waits for its parent to look."""
    try:
        return _stat(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _processes() -> Iterator[tuple[int, tuple[int, int]]]:
    """(pid, (parent, session)) of everything that runs."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                _, parent, _, session = _stat(int(entry))[:4]
                yield int(entry), (int(parent), int(session))


def _stat(pid: int) -> list[str]:
    """State, parent, group, session, ... of /proc/PID/stat; the name before may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
