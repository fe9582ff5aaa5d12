"""How fast a process of this machine computes on its cores: measured once, and kept in a file.

The file is in the folder of the user's caches (`XDG_CACHE_HOME`), by machine and threads: remove
it to measure anew.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from async_grpo.util.files import replacing

MEASURED_S = 1.0  # of each of the two measurements
ROWS, HIDDEN, INTERMEDIATE = 512, 256, 1024  # of a small model's MLP, and of its minibatch
READ_ROWS, READ_WIDTH, READ_BYTES = 4, 1024, 64 << 20  # of a step: weights that no cache holds


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast one process computes with a number of threads."""

    flops: float  # a second, in a small model's forward and backward pass
    bytes_per_s: float  # of weights that a step of an engine reads


def read_speed(*, threads: int) -> Speed:
    """The speed that the cache holds, or else a new measurement (2 s), which the cache keeps.

    A folder that cannot be written costs the next plan another measurement.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path, name = Path(home) / "async_grpo" / "cores.json", f"{platform.node()}, {threads} threads"
    known: dict[str, dict[str, float]] = {}
    with suppress(OSError, ValueError):
        known = json.loads(path.read_text())
    if name in known:
        return Speed(**known[name])
    speed = measured(threads)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(json.dumps({**known, name: asdict(speed)}, indent=1).encode())
    return speed


def measured(threads: int) -> Speed:
    """The fastest of many repetitions in CPU time, on which other processes have little effect."""
    import torch  # seconds, which a known speed does not take

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        inputs = torch.randn(ROWS, HIDDEN, requires_grad=True)
        up = torch.randn(HIDDEN, INTERMEDIATE, requires_grad=True)
        down = torch.randn(INTERMEDIATE, HIDDEN, requires_grad=True)
        weights = torch.ones(READ_WIDTH, READ_BYTES // READ_WIDTH // 4)
        states = torch.ones(READ_ROWS, READ_WIDTH)
        step_s = _fastest(lambda: (torch.relu(inputs @ up) @ down).sum().backward()) / threads
        read_s = _fastest(lambda: states @ weights) / threads
    finally:
        torch.set_num_threads(before)
    return Speed(12 * ROWS * HIDDEN * INTERMEDIATE / step_s, READ_BYTES / read_s)


def _fastest(work: Callable[[], object]) -> float:
    """The least CPU seconds of `work`, which is repeated for `MEASURED_S`."""
    taken: list[float] = []
    end_s = time.monotonic() + MEASURED_S
    while not taken or time.monotonic() < end_s:
        began_s = time.process_time()
        work()
        taken.append(time.process_time() - began_s)
    return min(taken)
