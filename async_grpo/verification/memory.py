"""The memory that processes hold together, for a limit of all of them.

The kernel limits the addresses of each process alone: it counts no children, no file in memory that
nobody has mapped. Control groups would count all, where a user may make one, which is rare.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence

from async_grpo.verification.processes import links

QUICK = ("RssAnon", "RssShmem", "VmSwap")  # counts what processes share once for each
EXACT = ("Pss_Anon", "Pss_Shmem", "SwapPss")
FOLDERS = ("/dev/shm", "/tmp")  # which may be in memory, of a jail or of a request
INODE_BYTES = 1024  # about what an empty file in memory takes
FASTEST_MIB_S = 8192  # nothing is expected to grow faster
SHORTEST_S, LONGEST_S = 0.01, 0.2
SHARE = 0.2  # of a processor that looking may take, as far as the longest pause allows


def held_mib(processes: Sequence[int], *, limit_mib: float) -> float:
    """What they hold, swapped out or not; exact only where a quick count is beyond the limit."""
    files = _files(processes)
    states = {process: f"/proc/{process}/status" for process in processes}
    rough = {p: _sum(path, QUICK) or _sum(path, ("VmRSS",)) for p, path in states.items()}
    held = files + sum(rough.values())
    if held / 2**20 > limit_mib:
        _signal(processes, signal.SIGSTOP)  # the count takes a while, in which they would grow
        exact = {process: _sum(f"/proc/{process}/smaps_rollup", EXACT) for process in processes}
        _signal(processes, signal.SIGCONT)
        held = files + sum(exact[process] or rough[process] for process in processes)
    return held / 2**20


def pause_s(*, room_mib: float, looked_s: float) -> float:
    """How long nobody need look at what may grow by so much, when a look takes so long to compute.

    >>> pause_s(room_mib=1024, looked_s=0.0005), pause_s(room_mib=8, looked_s=0.0002)
    (0.125, 0.01)
    """
    return min(LONGEST_S, max(SHORTEST_S, looked_s / SHARE, room_mib / FASTEST_MIB_S))


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            os.kill(process, number)


def _sum(path: str, kinds: tuple[str, ...]) -> int:
    """Bytes of these lines of a file of /proc; 0 where it may not be read."""
    try:
        with open(path) as file:
            lines = (line.partition(":") for line in file)
            return sum(int(size.split()[0]) << 10 for kind, _, size in lines if kind in kinds)
    except OSError:
        return 0


def _files(processes: Sequence[int]) -> int:
    """Bytes of their files in memory: without a name, and in folders that are not the machine's."""
    found: dict[tuple[int, int], int] = {}
    machine = {os.stat(folder).st_dev for folder in FOLDERS if os.path.isdir(folder)}
    for process in processes:
        places = [path for path, link in links(process) if link.startswith("/memfd:")]
        for path in (*places, *(f"/proc/{process}/root{folder}" for folder in FOLDERS)):
            with contextlib.suppress(OSError):  # it has ended, has no such, or we may not look
                file = os.stat(path)
                if path in places:
                    found[file.st_dev, file.st_ino] = file.st_blocks * 512
                elif file.st_dev not in machine:
                    room = os.statvfs(path)
                    used = (room.f_blocks - room.f_bfree) * room.f_frsize
                    found[file.st_dev, 0] = used + (room.f_files - room.f_ffree) * INODE_BYTES
    return sum(found.values())
