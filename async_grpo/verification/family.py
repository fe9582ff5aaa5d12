"""The processes below this one: hearing of their ends, finding them, and ending them all."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

RETRY_S = 0.002


def hear_of_children() -> int:
    """A descriptor that becomes readable whenever a child ends."""
    heard, rung = os.pipe()
    os.set_blocking(rung, False)
    os.set_blocking(heard, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(rung, warn_on_full_buffer=False)
    return heard


def forget_children() -> None:
    """Undo `hear_of_children` in a process that was forked from one that hears."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def drain(heard: int) -> None:
    try:
        while os.read(heard, 4096):
            continue
    except BlockingIOError:
        return


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended; the exit code is negative for a signal."""

    exit_code: int
    cpu_s: float
    memory_mib: float  # at its largest


def reap() -> dict[int, Ended]:
    """The children that have ended, by process id."""
    ended: dict[int, Ended] = {}
    while True:
        try:
            child, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if child == 0:
            return ended
        code = os.waitstatus_to_exitcode(status)
        ended[child] = Ended(code, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def children(process: int) -> list[int]:
    """The living children and those not reaped; none when it has ended itself."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


def descendants(process: int) -> list[int]:
    """Children, their children and so on, whatever session or group they have moved to."""
    found: list[int] = []
    waiting = [process]
    while waiting:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found


def kill_descendants(*, is_init: bool) -> None:
    """SIGKILL everything below this process, and reap it.

    The init of a pid namespace reaches all in one call. Elsewhere the orphans of what was killed
    come back as our children (see `adopt_orphans`), until none is left; one may be missed while it
    comes back, so nothing is waited for that has not been killed.
    """
    while True:
        if is_init:
            kill(-1)
        for process in descendants(os.getpid()):
            kill(process)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(RETRY_S)


def kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
