"""What Linux tells of running processes; every function bears a process that ends meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds. Shared pages count in full in `rss`, by their sharers in `pss`."""

    rss_bytes: int
    pss_bytes: int
    shared_bytes: int  # of rss: shared memory, such as the pages of Ray's object store
    num_fds: int
    num_threads: int


def stat(pid: int) -> list[str]:
    """State, parent, group, session, ... of /proc/PID/stat; the name before may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def processes() -> Iterator[tuple[int, tuple[int, int]]]:
    """(pid, (parent, session)) of everything that runs."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(*GONE):
                _, parent, _, session = stat(int(entry))[:4]
                yield int(entry), (int(parent), int(session))


def children(pid: int) -> set[int]:
    """What a process has started and not yet lost."""
    return {child for child, (parent, _) in processes() if parent == pid}


def is_running(pid: int) -> bool:
    """False for a zombie too: it only waits for its parent to look."""
    try:
        return stat(pid)[0] != "Z"
    except GONE:
        return False


def birth(pid: int) -> int:
    """When a process was started, in ticks since the machine was; 0 when there is none.

    Tells a process from a later one with the same number.
    """
    try:
        return int(stat(pid)[19])
    except GONE:
        return 0


def command_line(pid: int) -> str:
    """What a process was started as, or calls itself; empty when there is none."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except GONE:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def variables(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty when there is none."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except GONE:
        return {}
    pairs = (entry.partition("=") for entry in raw.split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}


def usage(pid: int) -> Usage | None:
    """What a process holds at this moment; None when there is none."""
    try:
        folder = Path(f"/proc/{pid}")
        sizes = dict(_sizes((folder / "smaps_rollup").read_text()))
        shared = dict(_sizes((folder / "status").read_text())).get("RssShmem", 0)
        num_fds, num_threads = len(os.listdir(folder / "fd")), len(os.listdir(folder / "task"))
    except GONE:
        return None
    if "Rss" not in sizes:  # it is ending: nothing is mapped any more
        return None
    return Usage(sizes["Rss"], sizes["Pss"], shared, num_fds, num_threads)


def peak_rss(pid: int) -> int:
    """The most that a process has held since it began, or since its peak was cleared."""
    return dict(_sizes(Path(f"/proc/{pid}/status").read_text()))["VmHWM"]


def _sizes(text: str) -> Iterator[tuple[str, int]]:
    """The `Name:  12 kB` lines of a /proc file, in bytes."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit == "kB" and number.isdigit():
            yield name, int(number) * 1024


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """A signal to each that still runs."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
