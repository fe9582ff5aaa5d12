"""How the processes of a run share this machine's cores: threads, waiting, priorities.

OpenMP reads its variables when torch is imported: they are set before. A given OMP_NUM_THREADS
counts everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of every so many, or "max"
THREADS = "OMP_NUM_THREADS"
MOST_THREADS = 8  # of a process by default: a small model's products gain nothing from more
# A thread that computes while it waits takes the core from the process that it waits for: with two
# such threads on two busy cores an engine is 10 to 20 times slower.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
# Ray would run engines at 15, behind the ranks: what they leave undone is missing afterwards.
EVEN_PRIORITY = {"RAY_worker_niceness": "0"}
RANK_NICENESS = 5  # on a CPU: ranks can catch up with all cores, an engine with many fewer


def num_cores(quota: Path = QUOTA, *, cores: int = 0) -> int:
    """Cores that this process may use: those of its affinity, within its container's quota."""
    cores = cores or len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        allowed, period = map(int, quota.read_text().split())
        cores = min(cores, max(1, allowed // period))
    return cores


def thread_variables(environ: Mapping[str, str], *, processes: int, cores: int) -> dict[str, str]:
    """Variables of each of `processes` equal ones, which have all cores between them.

    >>> thread_variables({}, processes=2, cores=5)["OMP_NUM_THREADS"]
    '2'
    >>> thread_variables({"OMP_NUM_THREADS": "7"}, processes=2, cores=5)["OMP_NUM_THREADS"]
    '7'
    """
    threads = min(max(1, cores // processes), MOST_THREADS)
    wanted = {THREADS: str(threads), **PASSIVE}
    return {name: environ.get(name, value) for name, value in wanted.items()}


def share_cores(environ: MutableMapping[str, str], *, recorded: int = 0) -> None:
    """Set the variables of this rank; `recorded`: the threads that its run began with."""
    ranks = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    if recorded:
        environ.setdefault(THREADS, str(recorded))
    environ.update(thread_variables(environ, processes=ranks, cores=num_cores()))


def give_way() -> None:
    """Let this process's threads yield to those of engines, which have fewer."""
    os.setpriority(os.PRIO_PROCESS, 0, max(RANK_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
