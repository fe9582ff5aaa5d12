"""Memory of running processes, watched from a process beside them.

What a process has for itself is its share of private pages. Shared memory is counted once, as what
is allocated to each nameless file (a memfd, or the object store's), whoever has it mapped.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from benchmarks import procfs

INTERVAL_S = 0.01
BLOCK_BYTES = 512
SHARED = ("/dev/shm/", "/memfd:")
Held = dict[str, int]  # bytes by role


class MemoryWatch:
    """The most that each role has held, between two questions."""

    def __init__(self, roles: Mapping[str, tuple[int, ...]]) -> None:
        """`roles`: the processes that count as one; files are told apart by their owner's role."""
        here, there = multiprocessing.Pipe()
        self._pipe = here
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=watch, args=(there, dict(roles)), name="memory-watch", daemon=True
        )

    def __enter__(self) -> MemoryWatch:
        self._process.start()
        self.peaks()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._pipe.close()
        self._process.join(10.0)

    def peaks(self) -> Held:
        """Since the last question; by role, and `total` of all at one moment."""
        self._pipe.send("peaks")
        answer: Held = self._pipe.recv()
        return answer

    def peaks_within(self, seconds: float) -> Held:
        """From now on for so long."""
        self.peaks()
        time.sleep(seconds)
        return self.peaks()


def watch(pipe: Connection, roles: Mapping[str, tuple[int, ...]]) -> None:
    """Look until the other end is closed."""
    peaks: Held = {}
    with contextlib.suppress(EOFError):
        while True:
            now = held(roles)
            peaks = {name: max(now.get(name, 0), peaks.get(name, 0)) for name in now | peaks}
            if pipe.poll(INTERVAL_S):
                pipe.recv()
                pipe.send(peaks)
                peaks = {}


def held(roles: Mapping[str, tuple[int, ...]]) -> Held:
    """What each role holds at this moment."""
    found: Held = {}
    files: dict[int, tuple[str, int]] = {}
    for role, pids in roles.items():
        found[role] = sum(private_bytes(pid) for pid in pids)
        for pid in pids:
            files |= {inode: (role, size) for inode, size in shared_files(pid)}
    for role, size in files.values():
        found[f"{role}, shared"] = found.get(f"{role}, shared", 0) + size
    return found | {"total": sum(found.values())}


def private_bytes(pid: int) -> int:
    """The process's share of anonymous pages; 0 when there is none.

    >>> private_bytes(os.getpid()) > 1_000_000
    True
    """
    with contextlib.suppress(*procfs.GONE):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) * 1024
    return 0


def shared_files(pid: int) -> Iterator[tuple[int, int]]:
    """(inode, allocated bytes) of the nameless files in memory that a process has open.

    >>> descriptor = os.memfd_create("doctest")
    >>> _ = os.write(descriptor, bytes(10_000))
    >>> dict(shared_files(os.getpid()))[os.fstat(descriptor).st_ino] >= 10_000
    True
    >>> os.close(descriptor)
    """
    with contextlib.suppress(*procfs.GONE):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{entry}"
            with contextlib.suppress(*procfs.GONE):
                if os.readlink(path).startswith(SHARED):
                    status = os.stat(path)
                    yield status.st_ino, status.st_blocks * BLOCK_BYTES
