"""What processes use: those that one has started, their processor time, memory and connections.

Memory is for a limit of all of them together. The kernel limits the addresses of each process
alone: it counts no children, no file in memory that nobody has mapped. Control groups would count
all, where a user may make one, which is rare. A connection is to somebody else: what a grader that
overruns may have waited for.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import struct
from collections.abc import Iterator, Sequence

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
# Of memory, as /proc calls it.
QUICK = ("RssAnon", "RssShmem", "VmSwap")  # counts what processes share once for each
EXACT = ("Pss_Anon", "Pss_Shmem", "SwapPss")
FOLDERS = ("/dev/shm", "/tmp")  # which may be in memory, of a jail or of a request
INODE_BYTES = 1024  # about what an empty file in memory takes
FASTEST_MIB_S = 8192  # nothing is expected to grow faster
SHORTEST_S, LONGEST_S = 0.01, 0.2
SHARE = 0.2  # of a processor that looking may take, as far as the longest pause allows
# Of connections.
TABLES = ("tcp", "tcp6", "udp", "udp6")
LIVE = {"01", "02", "04", "05"}  # established, being made, closed by this side alone
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_DUMP_REQUEST = 4, 20, 0x301
UDIAG_SHOW_PEER, UNIX_DIAG_PEER = 4, 2
REQUEST = struct.Struct("=IHHII BBHIIIII")
# Length and kind of the message; the socket's inode; of the first attribute its kind and value.
ANSWER = struct.Struct("=IH14xI8x2xHI")


def children(process: int) -> list[int]:
    """The children of a process, living or not reaped; none when it has ended itself."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


def descendants(process: int, *, most: float = math.inf) -> list[int]:
    """Children, their children and so on, whatever session or group they have moved to.

    At most `most` and a few: those of a program that forks without end come faster than they can
    be counted.
    """
    found: list[int] = []
    waiting = [process]
    while waiting and len(found) <= most:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found


def links(process: int) -> Iterator[tuple[str, str]]:
    """Each open file of a process, and what it leads to; none where we may not look."""
    try:
        for name in os.listdir(f"/proc/{process}/fd"):
            path = f"/proc/{process}/fd/{name}"
            yield path, os.readlink(path)
    except OSError:  # it has ended, or closed this one
        return


def cpu_seconds(processes: Sequence[int]) -> float:
    """Processor time that they have used, with that of their children that have ended."""
    ticks = 0
    for process in processes:
        try:
            with open(f"/proc/{process}/stat") as file:
                ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
        except OSError:  # it has ended
            continue
    return ticks / TICKS_A_SECOND


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


def hold_connection(processes: Sequence[int]) -> bool:
    """Whether one of them is connected, or is being connected, to who is none of them.

    A port of their own counts too, as nothing tells it from somebody else's; a pair of sockets and
    a listener do not.
    """
    held = {process: _sockets(process) for process in processes}
    ours = frozenset[int]().union(*held.values())
    return any(sockets & _live(process) for process, sockets in held.items() if sockets) or (
        bool(ours) and any(own in ours and peer not in ours for own, peer in _unix_pairs())
    )


def _sockets(process: int) -> frozenset[int]:
    """The sockets that a process holds, by inode."""
    return frozenset(int(link[8:-1]) for _, link in links(process) if link.startswith("socket:["))


def _live(process: int) -> frozenset[int]:
    """Sockets of the process' network that lead, or will lead, to another one."""
    found = set()
    for table in TABLES:
        try:
            with open(f"/proc/{process}/net/{table}") as file:
                lines = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        found |= {int(words[9]) for words in lines if words[3] in LIVE}
    return frozenset(found)


def _unix_pairs() -> Iterator[tuple[int, int]]:
    """Each connected unix socket that we can see, and the one that it is connected to.

    The kernel tells it over netlink alone (`sock_diag(7)`).
    """
    header = REQUEST.size, SOCK_DIAG_BY_FAMILY, NLM_F_DUMP_REQUEST, 1, 0
    every = socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, UDIAG_SHOW_PEER, 0, 0
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as kernel:
            kernel.send(REQUEST.pack(*header, *every))
            while True:
                data, offset = kernel.recv(1 << 18), 0
                while offset < len(data):
                    whole = data[offset : offset + ANSWER.size].ljust(ANSWER.size, b"\0")
                    length, kind, own, attribute, peer = ANSWER.unpack(whole)
                    if kind != SOCK_DIAG_BY_FAMILY:  # the end, or an error
                        return
                    if attribute == UNIX_DIAG_PEER:
                        yield own, peer
                    offset += length + -length % 4
    except OSError:
        return
