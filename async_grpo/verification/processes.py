"""The processes that one has started."""

from __future__ import annotations

import math
import os


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
