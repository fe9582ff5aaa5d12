"""Descendants of a process, and their processor time, memory and connections.

The server limits the memory of all of them together. The kernel limits only the address space of
each process: it counts neither children nor unmapped files in memory. Control groups would count
all, but few systems let a user make one. A grader that overruns may have waited for a connection.
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
# Memory: fields of /proc/PID/status and of /proc/PID/smaps_rollup.
QUICK = ("RssAnon", "RssShmem", "VmSwap")  # counts shared memory once for each process
EXACT = ("Pss_Anon", "Pss_Shmem", "SwapPss")
FOLDERS = ("/dev/shm", "/tmp")  # file systems in memory, of a jail or of a request
INODE_BYTES = 1024  # about the size of an empty file in memory
FASTEST_MIB_S = 8192  # the highest growth that is expected
SHORTEST_S, LONGEST_S = 0.01, 0.2  # pauses
SHARE = 0.2  # of a processor that looks may take, unless the pause is the longest
# Connections.
TABLES = ("tcp", "tcp6", "udp", "udp6")
LIVE = {"01", "02", "04", "05"}  # states: established, being made, closed by this side alone
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_DUMP_REQUEST = 4, 20, 0x301
UDIAG_SHOW_PEER, UNIX_DIAG_PEER = 4, 2
REQUEST = struct.Struct("=IHHII BBHIIIII")
# Length and type of the message; inode of the socket; type and value of the first attribute.
ANSWER = struct.Struct("=IH14xI8x2xHI")


def children(process: int) -> list[int]:
    """The children of a process, running or not reaped; none if the process has ended."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


def descendants(process: int, *, most: float = math.inf) -> list[int]:
    """Children, their children and so on, in any session or process group.

    Counting stops soon after `most`: a program may fork faster than its processes can be counted.
    """
    found: list[int] = []
    waiting = [process]
    while waiting and len(found) <= most:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found


def links(process: int) -> Iterator[tuple[str, str]]:
    """(path in /proc, target) of each open file of a process; none if they may not be read."""
    try:
        for name in os.listdir(f"/proc/{process}/fd"):
            path = f"/proc/{process}/fd/{name}"
            yield path, os.readlink(path)
    except OSError:  # it has ended, or closed this one
        return


def cpu_seconds(processes: Sequence[int]) -> float:
    """Processor time of processes, with that of their children that have ended."""
    ticks = 0
    for process in processes:
        try:
            with open(f"/proc/{process}/stat") as file:
                ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
        except OSError:  # it has ended
            continue
    return ticks / TICKS_A_SECOND


def held_mib(processes: Sequence[int], *, limit_mib: float) -> float:
    """MiB that processes hold, also swapped out; exact only if a quick count is over the limit."""
    files = _files(processes)
    states = {process: f"/proc/{process}/status" for process in processes}
    rough = {p: _sum(path, QUICK) or _sum(path, ("VmRSS",)) for p, path in states.items()}
    held = files + sum(rough.values())
    if held / 2**20 > limit_mib:
        _signal(processes, signal.SIGSTOP)  # the exact count is slow, and they would grow meanwhile
        exact = {process: _sum(f"/proc/{process}/smaps_rollup", EXACT) for process in processes}
        _signal(processes, signal.SIGCONT)
        held = files + sum(exact[process] or rough[process] for process in processes)
    return held / 2**20


def pause_s(*, room_mib: float, looked_s: float) -> float:
    """Seconds until the next look at memory.

    `room_mib`: by how much it may grow. `looked_s`: processor time that the last look took.

    >>> pause_s(room_mib=1024, looked_s=0.0005), pause_s(room_mib=8, looked_s=0.0002)
    (0.125, 0.01)
    """
    return min(LONGEST_S, max(SHORTEST_S, looked_s / SHARE, room_mib / FASTEST_MIB_S))


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            os.kill(process, number)


def _sum(path: str, kinds: tuple[str, ...]) -> int:
    """Sum of these lines of a file in /proc, in bytes; 0 if it may not be read."""
    try:
        with open(path) as file:
            lines = (line.partition(":") for line in file)
            return sum(int(size.split()[0]) << 10 for kind, _, size in lines if kind in kinds)
    except OSError:
        return 0


def _files(processes: Sequence[int]) -> int:
    """Bytes of files in memory: unnamed ones, and those in mounts that only these processes see."""
    found: dict[tuple[int, int], int] = {}
    machine = {os.stat(folder).st_dev for folder in FOLDERS if os.path.isdir(folder)}
    for process in processes:
        places = [path for path, link in links(process) if link.startswith("/memfd:")]
        for path in (*places, *(f"/proc/{process}/root{folder}" for folder in FOLDERS)):
            with contextlib.suppress(OSError):  # ended, without this file, or not permitted
                file = os.stat(path)
                if path in places:
                    found[file.st_dev, file.st_ino] = file.st_blocks * 512
                elif file.st_dev not in machine:
                    room = os.statvfs(path)
                    used = (room.f_blocks - room.f_bfree) * room.f_frsize
                    found[file.st_dev, 0] = used + (room.f_files - room.f_ffree) * INODE_BYTES
    return sum(found.values())


def hold_connection(processes: Sequence[int]) -> bool:
    """Whether one of the processes is connected, or is connecting, to another process.

    A TCP connection among themselves counts too, as it looks the same; a pair of unix sockets among
    themselves and a listening socket do not.
    """
    held = {process: _sockets(process) for process in processes}
    ours = frozenset[int]().union(*held.values())
    return any(sockets & _live(process) for process, sockets in held.items() if sockets) or (
        bool(ours) and any(own in ours and peer not in ours for own, peer in _unix_pairs())
    )


def _sockets(process: int) -> frozenset[int]:
    """Inodes of the sockets that a process holds."""
    return frozenset(int(link[8:-1]) for _, link in links(process) if link.startswith("socket:["))


def _live(process: int) -> frozenset[int]:
    """Inodes of the connected and connecting sockets in the network namespace of a process."""
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
    """(inode, inode of its peer) of each connected unix socket in this network namespace.

    The kernel reports these over netlink only, see `sock_diag(7)`.
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
