"""Figures of the weight sync benchmark are the quantities that their names say."""

import mmap
import os

import numpy as np
import pytest

from async_grpo.types import WeightsAck, WeightsVersion
from benchmarks.weight_sync.figures import figures_of, phases
from benchmarks.weight_sync.memory import held
from benchmarks.weight_sync.run import Sync
from benchmarks.weight_sync.timed_worker import Load

MIB = 2**20


def sync_of(**changes):
    ack = WeightsAck("w", WeightsVersion(0, 1), 2.0, pause_seconds=0.5, recomputed_tokens=7)
    timed = {
        "begin": 0.1, "fetch": 0.2, "stage": 0.3, "map": 0.2,
        "pause": 0.05, "load": 0.4, "resume": 0.05,
    }  # fmt: skip
    # Waits of 0.1 s all along, but 1.5 s over the update, and a longer one long before it.
    gaps = np.array([[9.0, 3.0], [10.0, 0.1], [10.1, 0.1], [12.0, 1.5], [12.1, 0.1], [12.2, 0.1]])
    load = Load(ack, timed, gaps, began_at=10.05, ended_at=12.05)
    fields = {
        "size_bytes": 100 * MIB, "num_buckets": 1, "copying": 0.25, "gathering": 0.3,
        "collecting": 1.0, "serving": 2.0, "load": load, "canary_max": 1e-6,
        "peaks": {"worker": 50 * MIB, "worker, shared": 100 * MIB, "trainer": 100 * MIB},
    }  # fmt: skip
    return Sync(**(fields | changes))


def test_phases_follow_each_other_and_leave_nothing_out():
    found = phases(sync_of())
    assert sum(found.values()) == pytest.approx(1.0 + 2.0)
    assert found["check, hash and put"] == pytest.approx(0.7)
    assert found["verify and copy to the engine"] == pytest.approx(0.3)
    assert found["canary"] == pytest.approx(0.7)


def test_figures_are_what_their_names_say():
    found = {figure.name: figure.value for figure in figures_of("m", [sync_of()])}
    assert found["m, sync / plain copy"] == pytest.approx(3.0 / 0.25)
    assert found["m, pause beyond a plain copy"] == pytest.approx(0.25)
    assert found["m, usual wait for a token"] == pytest.approx(0.1)
    assert found["m, longest wait for a token"] == pytest.approx(1.5)
    assert found["m, longest wait beyond a usual one and a plain copy"] == pytest.approx(1.15)
    assert found["m, worker and engine hold more"] == pytest.approx(1.5)
    assert found["m, trainer holds more"] == pytest.approx(1.0)


def test_memory_is_private_pages_and_every_shared_file_once():
    roles = {"one": (os.getpid(),), "the same again": (os.getpid(),)}
    before = held(roles)
    descriptor = os.memfd_create("test")
    try:
        os.write(descriptor, bytes(8 * MIB))
        # Not numpy's own memory: an allocator may give pages that this process already has.
        pages = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        private = np.frombuffer(pages, dtype=np.uint8)
        private[:] = 1
        after = held(roles)
    finally:
        os.close(descriptor)
    assert private.all()

    def shared(look):
        return sum(size for role, size in look.items() if role.endswith("shared"))

    assert shared(after) - shared(before) == 8 * MIB
    assert after["one"] - before["one"] == pytest.approx(32 * MIB, abs=8 * MIB)
