"""Dispatchers and trainers come, go and are killed; what is left is clean, and the rest works.

The model has a head of its own: test_loop.py has one that is tied.
"""

import contextlib
import json
import os
import signal

import pytest
import ray
from commands import dispatcher, trainer, under_torchrun, wait_until
from loops import num_registered, read_lines
from private_cluster import environment, is_running
from tiny_models import make_model

from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import CONTROLLER
from async_grpo.config.roles import GENERATION, REFERENCE
from async_grpo.data.order import QuestionStream

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]
NAMESPACE = ("--namespace", "lifecycle")
READY_S = 180
NUM_BATCHES, BATCH, GROUP = 7, 4, 4
TOLERANCE = 5e-6  # nats, float32
# A run that only has to go on leaves the cores to those who come and go meanwhile.
REWARD = """
import time

def share_of_digits(sample, **_):
    time.sleep(0.1)
    output = sample["output"]
    return {"reward": sum(map(str.isdigit, output)) / max(len(output), 1)}
"""


@pytest.fixture(scope="module")
def untied_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("untied-model"), tied=False)


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    file = tmp_path_factory.mktemp("lifecycle") / "rewards.py"
    file.write_text(REWARD)
    return f"{file}:share_of_digits"


@pytest.fixture(scope="module")
def connected(ray_cluster):
    """This process as a driver in the namespace of the commands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", environment()["RAY_AUTH_MODE"])
        Cluster.join(ray_cluster, namespace="lifecycle")
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def generation(ray_cluster, connected, untied_model, reward):
    options = ("--reward-fns", reward, "--max-num-seqs", 16, *NAMESPACE)
    with dispatcher(ray_cluster, untied_model, *options) as command:
        command.wait_for("registered", timeout_s=READY_S)
        yield command


@pytest.fixture(scope="module")
def logprob(ray_cluster, connected, untied_model):
    with start_logprob(ray_cluster, untied_model) as command:
        command.wait_for("registered", timeout_s=READY_S)
        yield command


def start_logprob(ray_cluster, untied_model):
    return dispatcher(
        ray_cluster,
        untied_model,
        "--mode",
        "logprob",
        "--max-tokens-per-gpu",
        512,
        "--max-restarts",
        0,
        *NAMESPACE,
    )


def members(role):
    controller = Cluster().find_actor(CONTROLLER)
    return Cluster().wait(controller.members.remote(role), timeout_s=30, who="the controller")


def train(*run, batches, by=trainer, ranks=1):
    return by(*run, "--num-training-batches", batches, *NAMESPACE, ranks=ranks)


# One that is killed is run again below; tests/launch/test_interrupts.py ends those of torchrun,
# tests/controller/test_controller.py refuses a second.
@pytest.mark.slow
def test_a_trainer_can_be_ended_at_any_time_and_run_again_at_once(
    ray_cluster, generation, untied_model, questions, tmp_path
):
    common = (ray_cluster, untied_model, questions)
    with train(*common, tmp_path / "a", batches=10_000, by=under_torchrun, ranks=2) as first:
        first.wait_for("INFO reward ", timeout_s=READY_S)
        with train(*common, tmp_path / "b", batches=1) as second:
            assert second.wait(timeout_s=READY_S) == 1
            assert second.err.splitlines()[-1].startswith("error: another trainer ")
            assert not (tmp_path / "b").exists()
        num_steps = first.out.count("INFO reward ")
        wait_until(lambda: first.out.count("INFO reward ") > num_steps, timeout_s=30)
        first.send(signal.SIGTERM)
        assert first.wait(timeout_s=60) != 0
        assert first.family() == set()
        assert first.err.count("interrupted") == 1
    with train(*common, tmp_path / "c", batches=1) as third:
        assert third.wait(timeout_s=READY_S) == 0, third.err
        assert "Traceback" not in third.err
    assert len(members(GENERATION)) == 1


def test_workers_of_one_run_grade_alike(ray_cluster, generation, untied_model):
    with dispatcher(ray_cluster, untied_model, "--reward-fns", "countdown", *NAMESPACE) as command:
        assert command.wait(timeout_s=60) == 1
        *said, error = command.err.splitlines()
        assert all(line.startswith("INFO ") for line in said)
        assert error.startswith(
            "error: --reward-fns and --reward-registry must be those of the ver"
        )
        assert f"dispatcher process {generation.pid} on " in error


def test_a_killed_trainer_goes_on_with_workers_that_never_stopped(
    ray_cluster, generation, untied_model, questions, tmp_path
):
    """The same questions in their order, clocks and ledger go on, no evaluation is repeated."""
    run = tmp_path / "run"
    rows, checkpoints = run / "training_metrics.jsonl", run / "checkpoints"

    def start():
        return train(
            *(ray_cluster, untied_model, questions, run, "--checkpoint-every-batches", 2),
            *("--learning-rate", 1e-3, "--eval-data-path", questions, "--dump-token-columns", True),
            *("--max-tokens-per-gpu", 64, "--max-staleness", 1),
            batches=NUM_BATCHES,
            ranks=2,
        )

    with start() as first:
        wait_until(
            lambda: len(read_lines(rows)) >= 3 and last_committed(checkpoints),
            timeout_s=READY_S * 2,
        )
        kill(first)
    assert len(read_lines(rows)) < NUM_BATCHES
    saved = last_committed(checkpoints)
    with start() as second:
        assert second.wait(timeout_s=READY_S * 2) == 0, second.out + second.err
        assert f"the run goes on after batch {saved}" in second.out
    assert num_registered(generation) == 1
    check_rows(read_lines(rows))
    check_samples(read_lines(run / "samples.jsonl"), questions)
    evaluations = read_lines(run / "evaluation_metrics.jsonl")
    assert [line["step"] for line in evaluations] == [0, NUM_BATCHES]
    check_ledger(checkpoints / f"batch_{NUM_BATCHES}")


@pytest.mark.slow  # the test of a killed trainer shows it of a run that goes on
def test_workers_outlive_a_trainer_that_is_killed(
    ray_cluster, generation, logprob, untied_model, questions, tmp_path
):
    common, kl = (ray_cluster, untied_model, questions), ("--kl-coefficient", 0.1)
    with train(*common, tmp_path / "a", *kl, batches=10_000) as killed:
        killed.wait_for("INFO reward ", timeout_s=READY_S)
        killed.send(signal.SIGKILL)
        killed.wait(timeout_s=10)
    with start_logprob(ray_cluster, untied_model) as late:  # its weights are lost
        late.wait_for("registered", timeout_s=READY_S)
        with train(*common, tmp_path / "b", *kl, batches=1, ranks=2) as again:
            assert again.wait(timeout_s=READY_S) == 0, again.err
        assert (len(members(GENERATION)), len(members(REFERENCE))) == (1, 2)
        late.send(signal.SIGTERM)
        assert late.wait(timeout_s=30) == 0
        assert late.out.count(" registered\n") == 1 and late.out.endswith("\nstopped\n")
        assert "Traceback" not in late.err
    assert len(members(REFERENCE)) == 1


@pytest.mark.slow  # tests/launch/test_workers.py has the sentence
def test_a_dispatcher_says_why_its_worker_was_lost(logprob):
    (worker,) = members(REFERENCE)
    os.kill(worker.pid, signal.SIGKILL)
    assert logprob.wait(timeout_s=60) == 1
    assert logprob.err.splitlines()[-1].startswith(
        f"error: reference worker {worker.worker_id} died"
    )
    assert "Traceback" not in logprob.err
    assert members(REFERENCE) == ()


def test_ctrl_c_ends_a_dispatcher_and_its_engine(ray_cluster, generation, untied_model):
    (worker,) = members(GENERATION)
    engine = {worker.pid, *children_of(worker.pid)}
    assert len(engine) > 1
    with start_logprob(ray_cluster, untied_model) as loading:  # in no phase does it matter
        loading.wait_for("starting", timeout_s=READY_S)
        loading.send(signal.SIGINT)
        generation.send(signal.SIGINT)
        assert (loading.wait(timeout_s=30), generation.wait(timeout_s=30)) == (0, 0)
        assert "Traceback" not in loading.err + generation.err
        assert (loading.family(), generation.family()) == (set(), set())
    wait_until(lambda: not any(map(is_running, engine)), timeout_s=10)
    assert members(GENERATION) == ()


def children_of(pid):
    tasks = f"/proc/{pid}/task"
    for task in os.listdir(tasks):
        with open(f"{tasks}/{task}/children") as file:
            yield from map(int, file.read().split())


def last_committed(checkpoints):
    """The number of batches it holds; 0 when there is none."""
    marks = checkpoints.glob("*/COMMITTED")
    return max((int(mark.parent.name.removeprefix("batch_")) for mark in marks), default=0)


def kill(command):
    for pid in command.family():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def check_rows(rows):
    assert [row["step"] for row in rows] == list(range(1, NUM_BATCHES + 1))
    assert [row["iteration"] for row in rows] == list(range(NUM_BATCHES))
    assert [row["optimizer_steps"] for row in rows] == list(range(1, NUM_BATCHES + 1))
    assert [row["total_samples_accumulated"] for row in rows] == [
        BATCH * GROUP * step for step in range(1, NUM_BATCHES + 1)
    ]
    assert max(row["canary_max"] for row in rows) <= TOLERANCE  # engine against trainer
    assert len({row["sync_batches"] for row in rows}) > 1


def check_samples(samples, questions):
    """Each slot has one group that counts, of the question that its ordinal stands for."""
    with open(questions) as file:
        inputs = [json.loads(line)["input"] for line in file]
    order = QuestionStream(len(inputs), seed=37)
    by_ordinal = {}
    for sample in samples:
        by_ordinal.setdefault(sample["ordinal"], []).append(sample)
    assert sorted(by_ordinal) == list(range(NUM_BATCHES * BATCH))
    for ordinal, group in by_ordinal.items():
        assert sorted(sample["index"] for sample in group) == list(range(GROUP))
        assert {sample["input"] for sample in group} == {inputs[order.index(ordinal)]}
        assert {sample["fate"] for sample in group} <= {"trained", "zero_contribution"}


def check_ledger(checkpoint):
    ledger = json.loads((checkpoint / "manifest.json").read_text())["state"]["resume"]["ledger"]
    assert ledger["open"] == []
    assert ledger["admitted_samples"] == sum(ledger["samples"].values())
    assert ledger["output_tokens"] == sum(ledger["tokens"].values()) > 0
    assert ledger["admitted_slots"] == sum(ledger["slots"].values()) == NUM_BATCHES * BATCH
