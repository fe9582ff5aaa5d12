"""The controller as an actor: found, made, killed, and called by other processes."""

import asyncio
import json
import os
import pickle
import signal
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import ray
from local_ray import local_ray
from scripted_run import QUESTIONS, make_config

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.records import BatcherPlan
from async_grpo.cluster import handles
from async_grpo.cluster.batched_calls import BatchedActor, BatchedCalls
from async_grpo.cluster.cluster import Cluster
from async_grpo.config.roles import GENERATION, teacher
from async_grpo.controller import find
from async_grpo.controller.find import find_or_make_controller
from async_grpo.rollout.weights_update import fetch_bytes
from async_grpo.run.companions import start_recorder, start_witness
from async_grpo.types import (
    Pulse,
    RunId,
    SamplingContract,
    WeightsAck,
    WeightsBucket,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.util.errors import ClusterError, LeaseLost, ProcessLostError, RunLost, WorkerError

pytestmark = pytest.mark.integration
FIRST, NEXT_RUN = WeightsVersion(7, 0), WeightsVersion(8, 0)
NUM_BYTES = 1 << 20
MATH = teacher("math")


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with local_ray(num_cpus=2, namespace="test"):
        yield


@pytest.fixture
def controller():
    handle = find_or_make_controller(Cluster())
    yield handle
    ray.kill(handle)


@pytest.fixture(scope="module")
def plan():
    return BatcherPlan(
        config=make_config(),
        questions=QUESTIONS,
        held_out=(),
        order=abs,  # functions that every process knows
        replacement=max,
        seed_of=None,
        sampling=SamplingContract(1.0, (1,), 12),
        num_ranks=1,
        incarnation=7,
        rules=LocalRules(find_algorithm(make_config())),
    )


def get(reference):
    return Cluster().wait(reference, timeout_s=60, who="the actor")


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def worker_class():
    # Local: Ray then sends its code, instead of a name that it cannot import.
    class FakeWorker(BatchedActor):
        def __init__(self):
            self._calls = []

        async def load_weights(self, snapshot):
            for bucket in snapshot.buckets:
                await fetch_bytes(bucket)
            self._calls.append(str(snapshot.version))
            return WeightsAck("", snapshot.version, 0.0, 0.0)

        async def abort_all(self):
            self._calls.append("abort")

        async def ping(self, after_s=0.0):
            await asyncio.sleep(after_s)
            return Pulse("none")

        async def calls(self):
            return self._calls

        async def score(self, number):
            return number + 1

        async def scores(self, number):
            return np.full(number, 0.5)

        async def end(self, number):
            os._exit(1)

    return FakeWorker


def trainer_class():
    class Trainer:
        """Owns the bytes of the weights and a run's witness, which are lost with it."""

        def snapshot(self, version):
            data = ray.put(np.zeros(NUM_BYTES, dtype=np.uint8))
            bucket = WeightsBucket((), data, size_bytes=NUM_BYTES, checksum=0)
            return WeightsSnapshot(version, (bucket,))

        async def until_death(self):
            await asyncio.Future()

    return Trainer


def make(actor_class, *arguments):
    return ray.remote(actor_class).options(num_cpus=0, max_concurrency=100).remote(*arguments)


def join(controller, name, role=GENERATION):
    worker = make(worker_class())
    info = WorkerInfo(name, role, "node", 1, "model", 128, 2.0, 0.0, 512)
    get(controller.register.remote(info, worker))
    return worker


def begin(controller, plan, witness):
    return RunId(plan.incarnation, get(controller.begin_run.remote(plan, witness, None)))


def publish(controller, run, snapshot):
    call = controller.publish.remote(run, snapshot, (GENERATION,), 30.0)
    return get(call)[GENERATION]


def kill(trainer, snapshot):
    """End a trainer; its bytes outlive it for a moment, on the same machine."""
    ray.kill(trainer)

    def is_lost():
        try:
            get(snapshot.buckets[0].data)
        except ClusterError:
            return True
        return False

    wait_until(is_lost)


def test_a_controller_that_was_killed_is_made_anew_by_whoever_asks_first(controller):
    assert find_or_make_controller(Cluster()) == controller
    os.kill(Cluster().process_of(controller), signal.SIGKILL)
    wait_until(lambda: is_dead(controller))
    with pytest.raises(ProcessLostError):
        get(controller.roles.remote())
    others = [find_or_make_controller(Cluster()) for _ in range(2)]
    assert others[0] == others[1] != controller
    ray.kill(others[0])


def is_dead(handle):
    try:
        get(handle.roles.remote())
    except ProcessLostError:
        return True
    return False


def test_a_controller_of_other_source_that_nobody_uses_is_replaced(controller, monkeypatch):
    monkeypatch.setattr(find, "code_hash", lambda: "another")
    other = find_or_make_controller(Cluster())
    assert other != controller
    ray.kill(other)


def test_the_weights_of_a_dead_trainer_keep_no_newcomer_out_and_cost_no_worker(controller, plan):
    trainer = make(trainer_class())
    run = begin(controller, plan, trainer)
    early = join(controller, "early")
    snapshot = get(trainer.snapshot.remote(FIRST))
    assert len(publish(controller, run, snapshot).acks) == 1
    kill(trainer, snapshot)
    late = join(controller, "late")
    assert get(late.calls.remote()) == []
    assert len(get(controller.members.remote(GENERATION))) == 2
    assert get(controller.fenced.remote(GENERATION)) == {}
    wait_until(lambda: has_ended(controller, run))
    successor = make(trainer_class())
    run = begin(controller, replace(plan, incarnation=8), successor)
    publish(controller, run, get(successor.snapshot.remote(NEXT_RUN)))
    assert get(late.calls.remote()) == [str(NEXT_RUN)]
    assert get(early.calls.remote()) == [str(FIRST), str(NEXT_RUN)]


def has_ended(controller, run):
    try:
        get(controller.status.remote(run))  # whoever is heard lives
    except RunLost as error:
        assert "trainer process" in str(error)
        return True
    return False


def test_another_process_asks_for_work_of_any_role(controller, plan):
    trainer = make(trainer_class())
    run = begin(controller, plan, trainer)
    worker = join(controller, "one", MATH)

    @ray.remote(num_cpus=0)
    def ask(number, method="score"):
        return ray.get(controller.ask.remote(run, MATH, method, number, cost=1.0, prefer="one"))

    assert get([ask.remote(number) for number in range(3)]) == [1, 2, 3]
    with pytest.raises(Exception, match="the lease on teacher:math worker one has ended"):
        ray.get(ask.remote(0, "end"))
    with pytest.raises(ProcessLostError):
        get(worker.calls.remote())
    get(controller.end_run.remote(run))
    ray.kill(trainer)


def test_what_one_process_asks_at_once_shares_calls_and_fails_alone(controller, plan):
    trainer = make(trainer_class())
    run = begin(controller, plan, trainer)
    join(controller, "one", MATH)
    shared = BatchedCalls(controller)

    async def ask(number, method="score"):
        asked = shared.ask("ask", run, MATH, method, number, cost=0.0)
        return await handles.work(asked, timeout_s=30.0, who="the controller")

    async def asked():
        *sums, scores, unasked, unknown = await asyncio.gather(
            *map(ask, range(32)), ask(NUM_BYTES, "scores"), ask(1, "unknown"),
            handles.work(shared.ask("ask", run, MATH), timeout_s=30.0, who="the controller"),
            return_exceptions=True,
        )  # fmt: skip
        assert sums == [number + 1 for number in range(32)]
        assert (scores == 0.5).all() and scores.nbytes == 8 * NUM_BYTES
        for error in (unasked, unknown):
            assert isinstance(error, WorkerError) and not isinstance(error, ProcessLostError)
        waiting = [asyncio.create_task(ask(number, "end")) for number in range(2)]
        for each in waiting:
            with pytest.raises(LeaseLost, match="the lease on teacher:math worker one has ended"):
                await each
        late = asyncio.create_task(ask(0))  # no worker is left
        await asyncio.sleep(0.5)
        ray.kill(controller)
        with pytest.raises(ProcessLostError, match="the controller died"):
            await late

    asyncio.run(asked())
    ray.kill(trainer)


def test_a_recorder_that_is_killed_is_started_again_and_ends_no_run(controller, plan, tmp_path):
    config = make_config(output_dir=str(tmp_path), dump_samples_filename="samples.jsonl")
    witness = start_witness(Cluster())
    recorder = start_recorder(config.recording, Cluster(), model="m")
    get(recorder.write.remote("first", 0, [group(0)]))
    call = controller.begin_run.remote(plan, witness, recorder)
    run = RunId(plan.incarnation, get(call))
    for actor in (recorder, witness):
        os.kill(Cluster().process_of(actor), signal.SIGKILL)
    wait_until(lambda: writes(recorder))
    get(recorder.write.remote("first", sys.maxsize, [group(1)]))
    ordinals = [json.loads(line)["ordinal"] for line in (tmp_path / "samples.jsonl").open()]
    assert ordinals == [0, 1]
    get(controller.heard.remote(run))
    get(controller.end_run.remote(run))
    for actor in (recorder, witness):
        ray.kill(actor)


def group(ordinal):
    return pickle.dumps([{"batch": 0, "ordinal": ordinal, "attempt": 0}])


def writes(recorder):
    try:
        get(recorder.write.remote("first", sys.maxsize, []))
    except ProcessLostError:
        return False
    return True
