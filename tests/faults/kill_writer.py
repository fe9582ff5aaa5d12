"""A process that saves without end, and one that kills it at any moment with SIGKILL."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from async_grpo.checkpoint import disk
from async_grpo.checkpoint.folder import CheckpointFolder
from faults.saves import KEEP, number_of, save

SIZE_BYTES = 1 << 18
LONGEST_LIFE_S = 0.12  # several saves


def write_forever(root: Path, *, first: int) -> None:
    """Save and report each number once its commit has returned."""
    print(first - 1, flush=True)
    number = first
    while True:
        save(disk, number, number, root=root, size=SIZE_BYTES)
        print(number, flush=True)
        number += 1


def kill_writers(root: Path, *, num_kills: int, seed: int) -> Counter[str]:
    """Outcomes of writers in one folder, each killed and followed by the next.

    `last`: the newest was the last that had been reported. `newer`: the one after, complete.
    `in the middle` counts the kills that left something half done.
    """
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    number = -1
    for _ in range(num_kills):
        reported = _killed_after(root, first=number + 1, life_s=rng.uniform(0, LONGEST_LIFE_S))
        is_litter = root.exists() and any(name.startswith(".") for name in disk.entries(root))
        outcomes["in the middle"] += is_litter
        newest = CheckpointFolder(root, keep=KEEP).newest()
        found = number_of(newest, disk=disk)
        outcomes[{None: "broken", reported: "last", reported + 1: "newer"}.get(found, "lost")] += 1
        number = reported if found is None else max(found, reported)
    return outcomes


def _killed_after(root: Path, *, first: int, life_s: float) -> int:
    """The last number that a writer reported before it was killed."""
    command = [sys.executable, "-m", "faults.kill_writer", str(root), str(first)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdout is not None
        ready = int(writer.stdout.readline())
        time.sleep(life_s)
        writer.kill()
        reported, _ = writer.communicate()
    # The kill may have cut the last line short.
    whole = [line for line in reported.splitlines(keepends=True) if line.endswith("\n")]
    return int(whole[-1]) if whole else ready


if __name__ == "__main__":
    write_forever(Path(sys.argv[1]), first=int(sys.argv[2]))
