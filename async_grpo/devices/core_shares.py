"""How the processes of a run share this machine's cores: threads, and how these wait.

OpenMP reads its variables when torch is imported: they are set before. What is given counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from async_grpo.util.run_folder import PARAMETERS_FILE, newest_checkpoint

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of every so many, or "max"
THREADS = "OMP_NUM_THREADS"
MOST_THREADS = 8  # by default: small products are not worth more
# A thread that computes while it waits takes the core from the process that it waits for: with two
# such threads on two busy cores an engine is 10 to 20 times slower.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


def num_cores(quota: Path = QUOTA, *, cores: int = 0) -> int:
    """Cores that this process may use: those of its affinity, within its container's quota."""
    cores = cores or len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        allowed, period = map(int, quota.read_text().split())
        cores = min(cores, max(1, allowed // period))
    return cores


def thread_variables(
    environ: Mapping[str, str], *, processes: int, cores: int, recorded: int = 0
) -> dict[str, str]:
    """Variables of each of `processes` that compute: they have no more threads than cores.

    `recorded`: the threads of a rank that a run began with.

    >>> thread_variables({}, processes=2, cores=5)["OMP_NUM_THREADS"]
    '2'
    >>> thread_variables({"OMP_NUM_THREADS": "7"}, processes=2, cores=5)["OMP_NUM_THREADS"]
    '7'
    """
    wanted = {THREADS: str(recorded or threads_each(processes, cores=cores)), **PASSIVE}
    return {name: environ.get(name, value) for name, value in wanted.items()}


def threads_each(processes: int, *, cores: int) -> int:
    """Threads of each of `processes` that compute, by default."""
    return min(max(1, cores // max(processes, 1)), MOST_THREADS)


def recorded_threads(folder: Path) -> int:
    """Threads of each rank of the run that goes on in this folder; 0: there is none to go on."""
    if newest_checkpoint(folder) is None:
        return 0
    with suppress(OSError, ValueError):
        return int(json.loads((folder / PARAMETERS_FILE).read_text()).get("threads", 0))
    return 0
