"""Meters beside what is measured from outside: the kernel's counters, another rank's clock."""

import re
import threading
import time
from pathlib import Path

import pytest
import torch
from meter_scenarios import LATE_S, steps_with_meters
from ranks import run_ranks

from async_grpo.config.train import TrainConfig
from async_grpo.training.meters import CPU_SIZE, Collectives, peak_memory, peak_tflops

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
    assert ranks[0]["plain"] == ranks[1]["plain"]
    assert ranks[0]["plain"]["num_ranks"] == 2 and ranks[0]["plain"]["peak_tflops"] == 0.5


def test_peak_memory_of_each_rank_is_what_the_kernel_shows_from_outside(ranks, watch):
    meters = ranks[0]["held"]
    for rank in range(2):
        outside = watch.most[f"pid{rank}"]
        assert meters[f"peak_process_bytes/rank_{rank}"] == pytest.approx(outside, rel=WITHIN)
    own = [meters[f"peak_process_bytes/rank_{rank}"] for rank in range(2)]
    assert own[1] - own[0] > 200 << 20  # what rank 1 had held for a second
    assert meters["peak_process_bytes"] == max(own)


def test_seconds_in_collectives_are_those_that_the_other_rank_is_late(ranks):
    """Sums of both ranks, the late one's own included."""
    plain, late = ranks[0]["plain"], ranks[0]["late"]
    stamps = [rank["stamps"] for rank in ranks]
    for part, meter in enumerate(("gathering_seconds", "agreeing_seconds")):
        delay = stamps[1][part][0] - stamps[0][part][0]
        assert delay > 0.9 * LATE_S
        assert late[meter] == pytest.approx(delay, rel=WITHIN, abs=2 * plain[meter])
        assert plain[meter] < 0.5 * LATE_S


def test_without_other_ranks_nobody_waits_and_memory_is_known():
    collectives = Collectives(CPU)
    with collectives.agreeing():
        time.sleep(0.05)
    first, second = collectives.take(), collectives.take()
    assert first["agreeing_seconds"] >= 0.05 and first["gathering_seconds"] == 0
    assert not any(second.values())
    assert peak_memory(CPU).keys() == {"peak_process_bytes"}


def test_a_peak_is_given_or_measured_or_left_out_on_a_cpu(monkeypatch):
    def config(peak):
        return TrainConfig(model_name_or_path="m", data_path="d", peak_tflops=peak)

    monkeypatch.setattr("torch.mm", lambda *_, out: time.sleep(0.01))
    assert peak_tflops(config("auto"), CPU) is None
    assert peak_tflops(config("989.5"), CPU) == 989.5
    expected = 2 * CPU_SIZE**3 / 0.01 / 1e12
    assert peak_tflops(config("measure"), CPU) == pytest.approx(expected, rel=WITHIN)
