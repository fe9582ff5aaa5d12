"""Dispatchers and trainers come, go and are killed; what is left is clean, and the rest works."""

import os
import signal

import pytest
import ray
from commands import dispatcher, trainer, wait_until
from private_cluster import environment, is_running

from async_grpo import cluster
from async_grpo.roles import GENERATION, REFERENCE

pytestmark = pytest.mark.integration
NAMESPACE = ("--namespace", "lifecycle")
READY_S = 180


@pytest.fixture(scope="module")
def connected(ray_cluster):
    """This process as a driver in the namespace of the commands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", environment()["RAY_AUTH_MODE"])
        cluster.connect(ray_cluster, namespace="lifecycle")
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def generation(ray_cluster, connected, tiny_model, sevens):
    options = ("--reward-fns", sevens, "--max-num-seqs", 16, *NAMESPACE)
    with dispatcher(ray_cluster, tiny_model, *options) as command:
        command.wait_for("registered", timeout_s=READY_S)
        yield command


@pytest.fixture(scope="module")
def logprob(ray_cluster, connected, tiny_model):
    with start_logprob(ray_cluster, tiny_model) as command:
        command.wait_for("registered", timeout_s=READY_S)
        yield command


def start_logprob(ray_cluster, tiny_model):
    return dispatcher(
        ray_cluster,
        tiny_model,
        "--mode",
        "logprob",
        "--max-tokens-per-gpu",
        512,
        "--max-restarts",
        0,
        *NAMESPACE,
    )


def members(role):
    controller = cluster.find_actor(cluster.CONTROLLER)
    return cluster.wait(controller.members.remote(role), timeout_s=30, who="the controller")


def train(ray_cluster, tiny_model, questions, output, *options, batches, ranks=0):
    options = ("--num-training-batches", batches, *options, *NAMESPACE)
    return trainer(ray_cluster, tiny_model, questions, output, *options, ranks=ranks)


def test_a_trainer_can_be_ended_at_any_time_and_run_again_at_once(
    ray_cluster, generation, tiny_model, questions, tmp_path
):
    common = (ray_cluster, tiny_model, questions)
    with train(*common, tmp_path / "a", batches=10_000, ranks=2) as first:
        first.wait_for("step 1 ", timeout_s=READY_S)
        with train(*common, tmp_path / "b", batches=1) as second:
            assert second.wait(timeout_s=READY_S) == 1
            assert second.err.splitlines()[-1].startswith("error: another trainer ")
            assert not (tmp_path / "b").exists()
        num_steps = first.out.count("step ")
        wait_until(lambda: first.out.count("step ") > num_steps, timeout_s=30)
        first.send(signal.SIGTERM)
        assert first.wait(timeout_s=60) != 0
        assert first.family() == set()
        assert first.err.count("interrupted") == 1
    with train(*common, tmp_path / "c", batches=1) as third:
        assert third.wait(timeout_s=READY_S) == 0, third.err
        assert "Traceback" not in third.err
    assert len(members(GENERATION)) == 1


def test_a_reference_that_nobody_serves_is_told_with_its_remedy(
    ray_cluster, generation, tiny_model, questions, tmp_path
):
    options = ("--kl-coefficient", 0.1, "--worker-timeout-s", 1)
    common = (ray_cluster, tiny_model, questions, tmp_path / "run")
    with train(*common, *options, batches=1) as command:
        assert command.wait(timeout_s=60) == 1
        error = command.err.splitlines()[-1]
        assert "a reference worker (the KL coefficient is not 0), start one with `python" in error
        assert not (tmp_path / "run").exists()


def test_workers_of_one_run_grade_alike(ray_cluster, generation, tiny_model):
    with dispatcher(ray_cluster, tiny_model, "--reward-fns", "countdown", *NAMESPACE) as command:
        assert command.wait(timeout_s=60) == 1
        *said, error = command.err.splitlines()
        assert all(line.startswith("INFO ") for line in said)
        assert error.startswith(
            "error: --reward-fns and --reward-registry must be those of the ver"
        )
        assert f"dispatcher process {generation.pid} on " in error


@pytest.mark.slow  # test_real_resume shows it of a run that goes on
def test_workers_outlive_a_trainer_that_is_killed(
    ray_cluster, generation, logprob, tiny_model, questions, tmp_path
):
    common, kl = (ray_cluster, tiny_model, questions), ("--kl-coefficient", 0.1)
    with train(*common, tmp_path / "a", *kl, batches=10_000) as killed:
        killed.wait_for("step 1 ", timeout_s=READY_S)
        killed.send(signal.SIGKILL)
        killed.wait(timeout_s=10)
    with start_logprob(ray_cluster, tiny_model) as late:  # the weights that it should load are lost
        late.wait_for("registered", timeout_s=READY_S)
        with train(*common, tmp_path / "b", *kl, batches=1, ranks=2) as again:
            assert again.wait(timeout_s=READY_S) == 0, again.err
        assert (len(members(GENERATION)), len(members(REFERENCE))) == (1, 2)
        late.send(signal.SIGTERM)
        assert late.wait(timeout_s=30) == 0
        assert late.out.count(" registered\n") == 1 and late.out.endswith("\nstopped\n")
        assert "Traceback" not in late.err
    assert len(members(REFERENCE)) == 1


def test_a_dispatcher_says_why_its_worker_was_lost(logprob):
    (worker,) = members(REFERENCE)
    os.kill(worker.pid, signal.SIGKILL)
    assert logprob.wait(timeout_s=60) == 1
    assert logprob.err.splitlines()[-1].startswith(
        f"error: reference worker {worker.worker_id} died"
    )
    assert "Traceback" not in logprob.err
    assert members(REFERENCE) == ()


def test_ctrl_c_ends_a_dispatcher_and_its_engine(ray_cluster, generation, tiny_model):
    (worker,) = members(GENERATION)
    engine = {worker.pid, *children_of(worker.pid)}
    assert len(engine) > 1
    with start_logprob(ray_cluster, tiny_model) as loading:  # in no phase does it matter
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
