"""Engines and ranks that have the same devices in turns, as users start them.

On a CPU an engine sleeps by ending its processes, and wakes by making them again.
"""

import contextlib
import os
import signal
import time

import psutil
import pytest
from commands import wait_until
from loops import READY_S, Setup, controller_call, wait_until_registered

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NAMESPACE = "colocated"
BATCHES = 3
SHAPE = {
    "num_training_batches": BATCHES,
    "max_staleness": 0,
    "deterministic": True,
    "batch_size": 4,
    "train_minibatch_size": 2,
    "ratio_mode": "decoupled",
    "learning_rate": 2e-3,
    "num_batches_per_ref_model_update": 100,
}
SAME = ("loss", "grad_norm", "avg_reward", "trained_tokens", "entropy", "total_samples_accumulated")


@pytest.fixture(scope="module")
def setup(ray_cluster, tiny_model, questions, tmp_path_factory):
    setup = Setup(tmp_path_factory.mktemp("colocated"), ray_cluster, tiny_model, questions,
                  namespace=NAMESPACE, reward="share_of_digits")  # fmt: skip
    with setup.workers("generation", "--colocated", num_workers=1) as generation:
        wait_until_registered(generation, 1)
        setup.generation = generation
        yield setup


def steps(setup, name):
    return [{key: row[key] for key in SAME} for row in setup.rows(name)]


def engine_bytes(pid):
    """Resident memory of what a worker has started."""
    found = 0
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += child.memory_info().rss
    return found


def test_a_colocated_run_has_the_losses_of_one_with_devices_apart(setup, driver):
    """To the bit, and while a batch is trained nothing is resident of the engine."""
    with setup.train("apart", **SHAPE) as command:
        assert command.wait(timeout_s=READY_S) == 0, command.err[-4000:]
    (info,) = controller_call("members", "generation")
    resident = {}  # MiB of the engine's processes, by steps that are written
    with setup.train("colocated", colocated=True, **SHAPE) as command:
        while not command.has_ended():
            num_steps = len(setup.rows("colocated"))
            resident.setdefault(num_steps, []).append(engine_bytes(info.pid) >> 20)
            time.sleep(0.05)
        assert command.wait(timeout_s=READY_S) == 0, command.err[-4000:]
    assert steps(setup, "colocated") == steps(setup, "apart")
    assert controller_call("counts", "generation")["slept"] == 1 + BATCHES
    for num_steps in range(0, 2 * BATCHES, 2):
        assert min(resident[num_steps]) < 50
        assert max(resident[num_steps]) > 400


def test_an_adapter_is_proved_and_trained_the_same_in_turns(setup):
    options = SHAPE | {"lora_rank": 4, "num_training_batches": 2}
    for name in ("adapter-apart", "adapter-colocated"):
        with setup.train(name, colocated=name == "adapter-colocated", **options) as command:
            assert command.wait(timeout_s=READY_S) == 0, command.err[-4000:]
    assert steps(setup, "adapter-colocated") == steps(setup, "adapter-apart")
    assert all(row["grad_norm"] > 0 for row in setup.rows("adapter-colocated"))


def test_a_run_that_is_stopped_while_engines_sample_saves_and_goes_on(setup):
    with setup.train("stopped", colocated=True, **SHAPE) as command:
        wait_until(lambda: len(setup.rows("stopped")) == 2, timeout_s=READY_S)
        command.send(signal.SIGINT)  # while an engine is made again
        assert command.wait(timeout_s=READY_S) != 0
    assert "saved" in command.err + command.out
    with setup.train("stopped", colocated=True, **SHAPE) as command:
        assert command.wait(timeout_s=READY_S) == 0, command.err[-4000:]
    assert steps(setup, "stopped") == steps(setup, "apart")


def test_a_worker_that_is_killed_asleep_is_started_again_and_no_sample_is_lost(setup, driver):
    before = controller_call("counts", "generation")
    options = SHAPE | {"deterministic": False, "max_staleness": 1, "num_training_batches": 4}
    with setup.train("killed", colocated=True, **options) as command:
        (info,) = controller_call("members", "generation")
        wait_until(lambda: len(setup.rows("killed")) >= 1, timeout_s=READY_S)
        wait_until(lambda: engine_bytes(info.pid) < 50 << 20, timeout_s=READY_S)
        os.kill(info.pid, signal.SIGKILL)
        assert command.wait(timeout_s=READY_S) == 0, command.err[-4000:]
    counts = controller_call("counts", "generation")
    assert counts["fenced: died"] == before.get("fenced: died", 0) + 1
    assert counts["registered"] == before["registered"] + 1
    rows = setup.rows("killed")
    assert [row["fate_trained"] + row["fate_zero_contribution"] for row in rows] == [8] * 8
    assert max(row["max_lag"] for row in rows) <= 1
