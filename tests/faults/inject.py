"""Waits for the moment of a fault, and commits it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from benchmarks.cores import family
from benchmarks.procfs import send
from faults.live import LiveRun
from faults.plan import Phase

PHASE_TIMEOUT_S = 30.0
MOST_IDLE_S = 2.0  # before a fault at any moment
SLOW_PERIOD_S, SLOW_SHARE = 0.2, 0.1  # ten times slower


def wait_for_phase(phase: Phase, run: LiveRun, *, generator: random.Random) -> bool:
    """Until the run is in `phase`; False when it was not seen there in time."""
    if phase == "any":
        time.sleep(generator.uniform(0, MOST_IDLE_S))
        return True
    if phase == "weight sync":  # begins when a batch's line has been written
        metrics = run.output / "training_metrics.jsonl"
        size = _size(metrics)
        return _until(lambda: _size(metrics) > size, interval_s=0.002)
    if phase == "checkpoint":
        folder = run.output / "checkpoints"
        before = _names(folder)
        return _until(lambda: bool(_names(folder) - before), interval_s=0.002)
    return _until(lambda: run.probe.status().get(phase, 0) > 0, interval_s=0.01)


class Slowness:
    """Within, processes and what they have started run a tenth of the time."""

    def __init__(self, pids: Collection[int]) -> None:
        self._pids = family(*pids)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slowness", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        send(self._pids, signal.SIGCONT)

    def _run(self) -> None:
        while not self._over.is_set():
            send(self._pids, signal.SIGSTOP)
            self._over.wait(SLOW_PERIOD_S * (1 - SLOW_SHARE))
            send(self._pids, signal.SIGCONT)
            self._over.wait(SLOW_PERIOD_S * SLOW_SHARE)


def _until(condition: Callable[[], bool], *, interval_s: float) -> bool:
    deadline = time.monotonic() + PHASE_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval_s)
    return True


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()
