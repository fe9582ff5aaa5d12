"""The processes that one has started, and what they have used."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


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
