"""Dispatchers of roles without an engine: verifier pools that grade one run, and a teacher."""

import asyncio
import os
import signal
import sys

import numpy as np
import pytest
import ray
import ray.cloudpickle
import torch
from commands import Command, dispatcher, wait_until
from private_cluster import environment
from scripted_run import make_config

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.records import BatcherPlan
from async_grpo.cluster.cluster import Cluster
from async_grpo.config.roles import GENERATION, VERIFIER, teacher
from async_grpo.controller.find import find_or_make_controller
from async_grpo.model.scorer import Scorer
from async_grpo.run.companions import start_witness
from async_grpo.types import (
    EndOfStep,
    LogprobRequest,
    Pulse,
    Question,
    RunId,
    SamplingContract,
    Turn,
    VersionSpan,
    WeightsAck,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.util.errors import WeightSyncError

pytestmark = pytest.mark.integration
NAMESPACE, TIMEOUT_S, READY_S = "roles", 60, 180
MATH = teacher("math")
GROUP, BATCH, NUM_BATCHES = 4, 8, 4
REWARD = """
import time

def grade(sample, **_):
    time.sleep(0.1)
    return {"reward": float(sample["output"].split("-")[1])}
"""
TOLERANCE = 1e-5  # nats, float32: the same forward in another process


@pytest.fixture(scope="module")
def controller(ray_cluster):
    """This process as a driver in the namespace of the commands; its engine is registered."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", environment()["RAY_AUTH_MODE"])
        Cluster.join(ray_cluster, namespace=NAMESPACE)
        controller = find_or_make_controller(Cluster())
        engine = ray.remote(Engine).options(num_cpus=0, max_concurrency=1000).remote()
        info = WorkerInfo("engine", GENERATION, "node", 0, "model", 64, 100.0, 0.0, 512)
        get(controller.register.remote(info, engine))
        yield controller
        ray.kill(controller)
        ray.shutdown()


class Engine:
    """Its outputs say whose they are."""

    async def ping(self, after_s=0.0):
        await asyncio.sleep(after_s)
        return Pulse("none")

    async def load_weights(self, snapshot):
        self._version = snapshot.version
        return WeightsAck("engine", snapshot.version, 0.0, 0.0)

    async def abort_all(self):
        return None

    async def generate(self, request):
        ids, logprobs = np.arange(4, dtype=np.int32), np.full(4, -0.5, np.float32)
        spans = (VersionSpan(self._version, 0, 4),)
        texts = (f"{request.ordinal}-{index}" for index in range(request.num_samples))
        return tuple(Turn(ids, logprobs, spans, "stop", text) for text in texts)


def get(reference):
    return Cluster().wait(reference, timeout_s=TIMEOUT_S, who="the controller")


def members(controller, role):
    return get(controller.members.remote(role))


class Trainer:
    """Rank 0 of a run, with weights that are none."""

    def __init__(self, controller, folder, *, incarnation):
        config = make_config(
            output_dir=str(folder),
            batch_size=BATCH,
            samples_per_question=GROUP,
            num_training_batches=NUM_BATCHES,
            max_staleness=1,
            max_tokens_per_gpu=1000,
        )
        plan = BatcherPlan(
            config=config,
            questions=(Question(np.arange(3, dtype=np.int32), "2+2=", "4", {}),),
            held_out=(),
            order=lambda ordinal: 0,
            replacement=lambda slot, *, attempt: 0,
            seed_of=None,
            sampling=SamplingContract(1.0, (1,), config.sampling.max_generation_tokens),
            num_ranks=1,
            incarnation=incarnation,
            rules=LocalRules(find_algorithm(config)),
        )
        self._controller, self._witness = controller, start_witness(Cluster())
        epoch = get(controller.begin_run.remote(plan, self._witness, None))
        self.run = RunId(incarnation, epoch)

    def publish(self, batches):
        version = WeightsVersion(self.run.incarnation, batches)
        snapshot = WeightsSnapshot(version, ())
        get(self._controller.publish.remote(self.run, snapshot, (GENERATION,), TIMEOUT_S))
        get(self._controller.published.remote(self.run, version))

    def train(self):
        """Yield each item; weights are published after each batch."""
        self.publish(0)
        index = num_batches = 0
        while num_batches < NUM_BATCHES:
            call = self._controller.next_items.remote(self.run, 0, index)
            while not ray.wait([call], timeout=0.1)[0]:
                self._controller.hungry.remote(self.run, index)
                self._controller.heard.remote(self.run)
            items = get(call)
            yield from items
            index += 1
            if isinstance(items[-1], EndOfStep) and items[-1].is_last_of_batch:
                num_batches += 1
                self.publish(num_batches)

    def end(self):
        get(self._controller.end_run.remote(self.run))


def start_pool(address, reward):
    options = ("--mode", "verifier", "--reward-fns", reward, "--global-num-verifiers", 2)
    return Command(
        *("worker_dispatcher.py", "--ray-address", address, "--namespace", NAMESPACE), *options
    )


def graded(controller):
    """{worker id: samples that it has graded}"""
    pools = get(controller.receivers.remote(VERIFIER))
    return {info.worker_id: get(pool.status.remote()).done.get("scored", 0) for info, pool in pools}


def processes(controller):
    return [
        get(pool.status.remote()).num_processes
        for _, pool in get(controller.receivers.remote(VERIFIER))
    ]


def test_grading_scales_over_two_pools_and_goes_on_when_the_dispatcher_of_one_is_killed(
    ray_cluster, controller, tmp_path
):
    file = tmp_path / "mine.py"
    file.write_text(REWARD)
    reward = f"{file}:grade"
    with start_pool(ray_cluster, reward) as first, start_pool(ray_cluster, reward) as second:
        for pool in (first, second):
            pool.wait_for("registered", timeout_s=READY_S)
        wait_until(lambda: processes(controller) == [1, 1], timeout_s=TIMEOUT_S)
        trainer = Trainer(controller, tmp_path, incarnation=1)
        samples, ends = [], []
        for item in trainer.train():
            if not isinstance(item, EndOfStep):
                samples += item.samples
                continue
            ends.append(item)
            if len(ends) == 1:
                assert all(graded(controller).values()), "both have graded"
                first.send(signal.SIGKILL)
        assert len(members(controller, VERIFIER)) == 1
        wait_until(lambda: processes(controller) == [min(2, os.cpu_count())], timeout_s=TIMEOUT_S)
        assert sum(graded(controller).values()) >= (NUM_BATCHES - 2) * BATCH * GROUP
        keys = sorted((sample.ordinal, sample.index) for sample in samples)
        assert keys == [(o, i) for o in range(NUM_BATCHES * BATCH) for i in range(GROUP)]
        assert all(sample.verdict.reward == sample.index for sample in samples)
        assert [end.fates["trained"] for end in ends] == [BATCH * GROUP] * NUM_BATCHES

        file.write_text(REWARD.replace("0.1", "0.2"))
        with start_pool(ray_cluster, reward) as edited:
            assert edited.wait(timeout_s=READY_S) == 1
            error = edited.err.splitlines()[-1]
            assert error.startswith("error: a reward must stay as it is while it is used, but ")
            assert f"{file} (" in error and ", now " in error
            assert f"was edited since dispatcher process {second.pid} on " in error
            assert " and trainer process " in error
        trainer.end()
        second.send(signal.SIGINT)
        assert second.wait(timeout_s=TIMEOUT_S) == 0, second.err


@pytest.mark.slow  # tests/rollout/test_logprob_worker.py has it without Ray
def test_a_teacher_scores_with_its_own_weights_whatever_the_policy_becomes(
    ray_cluster, controller, tiny_model, tmp_path
):
    prompt, output = np.array([3, 13, 4, 19], np.int32), np.array([5, 9, 30, 1], np.int32)
    scorer = Scorer(tiny_model, device=torch.device("cpu"), dtype="float32")
    (expected,) = scorer.score([(prompt, output)], temperature=1.0)
    options = ("--mode", "teacher", "--name", "math", "--namespace", NAMESPACE)
    with dispatcher(ray_cluster, tiny_model, *options) as command:
        command.wait_for("registered", timeout_s=READY_S)
        ((info, handle),) = get(controller.receivers.remote(MATH))
        assert info.role == MATH
        trainer = Trainer(controller, tmp_path, incarnation=2)

        def scores():
            request = LogprobRequest((prompt,), (output,), 1.0, None)
            ask = controller.ask.remote(trainer.run, MATH, "logprobs", request, cost=8.0)
            return get(ask)[0]

        before = scores()
        assert np.abs(before - expected).max() <= TOLERANCE
        trainer.publish(0)
        with pytest.raises(WeightSyncError, match=r"a teacher:math worker keeps the weights"):
            get(handle.load_weights.remote(WeightsSnapshot(WeightsVersion(2, 0), ())))
        assert np.array_equal(scores(), before)
        trainer.end()
