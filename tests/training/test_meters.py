"""Meters beside what is measured from outside: the kernel's counters, another rank's clock."""

import re
import threading
import time
from itertools import count
from pathlib import Path

import pytest
import torch
from meter_scenarios import LATE_S, steps_with_meters
from ranks import run_ranks

from async_grpo.config.training_options import MemoryOptions
from async_grpo.training.meters import CPU_SIZE, Timers, peak_memory, peak_tflops

CPU = torch.device("cpu")
WITHIN = 0.05


class MemoryWatch(threading.Thread):
    """Polls the resident memory of the processes that leave their number in a folder."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder, self.most, self.is_over = folder, {}, threading.Event()

    def run(self):
        while not self.is_over.wait(0.005):
            for path in self.folder.glob("pid?"):
                try:
                    status = Path(f"/proc/{path.read_text()}/status").read_text()
                    resident = 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])
                except (OSError, TypeError):  # it has ended, or has not begun
                    continue
                self.most[path.name] = max(self.most.get(path.name, 0), resident)


@pytest.fixture(scope="module")
def watch(tmp_path_factory):
    return MemoryWatch(tmp_path_factory.mktemp("watched"))


@pytest.fixture(scope="module")
def ranks(watch, tmp_path_factory):
    watch.start()
    folder = tmp_path_factory.mktemp("ranks")
    yield run_ranks(steps_with_meters, num_ranks=2, folder=folder, output_dir=str(watch.folder))
    watch.is_over.set()


def test_all_ranks_have_the_same_meters(ranks):
    meters, _ = ranks[0]["plain"]
    assert meters == ranks[1]["plain"][0]
    assert meters["num_ranks"] == 2 and meters["peak_tflops"] == 0.5


def test_peak_memory_of_each_rank_is_what_the_kernel_shows_from_outside(ranks, watch):
    meters, _ = ranks[0]["held"]
    for rank in range(2):
        outside = watch.most[f"pid{rank}"]
        assert meters[f"peak_process_bytes/rank_{rank}"] == pytest.approx(outside, rel=WITHIN)
    own = [meters[f"peak_process_bytes/rank_{rank}"] for rank in range(2)]
    assert own[1] - own[0] > 200 << 20  # what rank 1 had held for a second
    assert meters["peak_process_bytes"] == max(own)


@pytest.mark.parametrize("step", ["plain", "held", "late"])
def test_seconds_in_collectives_are_those_of_watches_around_torch_s_own_functions(ranks, step):
    """Sums of both ranks; when one is late by a second, the other stands still for it."""
    meters, _ = ranks[0][step]
    names = ("all_gather_seconds", "reduce_scatter_seconds", "agreeing_seconds")
    for number, name in enumerate(names):
        outside = sum(rank[step][1][number] for rank in ranks)
        assert meters[name] == pytest.approx(outside, rel=WITHIN, abs=0.02)
    gathers = [meters["all_gather_seconds"], meters["reduce_scatter_seconds"]]
    assert meters["gathering_seconds"] == pytest.approx(sum(gathers)) and min(gathers) > 0
    waited = [meters["gathering_seconds"], meters["agreeing_seconds"]]
    assert min(waited) > 0.5 * LATE_S or step != "late"


def test_seconds_of_the_optimizer_are_those_of_the_step_before_with_its_clipping(ranks):
    assert ranks[0]["plain"][0]["updating_seconds"] == 0
    for step in ("held", "late"):
        adamw = sum(rank[step][1][3] for rank in ranks)
        clipping = ranks[0][step][0]["updating_seconds"] - adamw
        assert adamw > 0 and 0 < clipping < 1


def test_without_other_ranks_nobody_waits_and_memory_is_known():
    timers = Timers(CPU)
    with timers.agreeing(), timers.enqueuing("copying_seconds"):  # a CPU has no copies
        time.sleep(0.05)
    first, second = timers.take(), timers.take()
    assert "copying_seconds" not in first
    assert first["agreeing_seconds"] >= 0.05 and first["gathering_seconds"] == 0
    assert not any(second.values())
    assert peak_memory(CPU).keys() == {"peak_process_bytes"}


def test_on_a_device_streams_are_timed_by_events_and_memory_by_torch(monkeypatch):
    """With events that are 250 ms apart, for want of a device."""
    clock_ms, order = count(0, 250), []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.at_ms = next(clock_ms)

        def elapsed_time(self, later):
            order.append("read")
            return later.at_ms - self.at_ms

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: order.append("caught up"))
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda device: 3 << 30)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: 2 << 30)
    timers = Timers(torch.device("cuda"))
    names = ["all_gather", "all_gather", "reduce_scatter", "copying", "updating"]
    for name in names:
        with timers.enqueuing(f"{name}_seconds"):
            assert not order  # nothing waits for the device between minibatches
    seconds = timers.take()
    assert order == ["caught up"] + ["read"] * len(names)
    assert seconds == {
        "all_gather_seconds": 0.5, "reduce_scatter_seconds": 0.25, "gathering_seconds": 0.75,
        "copying_seconds": 0.25, "updating_seconds": 0.25, "agreeing_seconds": 0.0,
    }  # fmt: skip
    assert not any(timers.take().values())
    memory = peak_memory(torch.device("cuda"))
    assert (memory["peak_device_bytes"], memory["peak_allocated_bytes"]) == (3 << 30, 2 << 30)


def test_a_peak_is_given_or_measured_or_left_out_on_a_cpu(monkeypatch):
    def options(peak):
        return MemoryOptions(peak_tflops=peak)

    monkeypatch.setattr("torch.mm", lambda *_, out: time.sleep(0.01))
    assert peak_tflops(options("auto"), CPU) is None
    assert peak_tflops(options("989.5"), CPU) == 989.5
    expected = 2 * CPU_SIZE**3 / 0.01 / 1e12
    assert peak_tflops(options("measure"), CPU) == pytest.approx(expected, rel=WITHIN)
