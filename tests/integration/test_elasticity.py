"""Workers that come and go in mid-run, in a clock that jumps: real batcher, real registry."""

import asyncio
from collections import Counter

from scripted import Handle, Registry, make_completion, make_question, make_verdict, run
from scripted_run import INCARNATION, Run, Script, make_config

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.records import BatcherPlan
from async_grpo.config.roles import GENERATION, VERIFIER, role_of
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.controller.served_run import ServedRun
from async_grpo.types import (
    Pulse,
    SamplingContract,
    WeightsAck,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)

GROUP, CAPACITY = 4, 8
SECONDS_A_GROUP = 1.0
RATE = CAPACITY / SECONDS_A_GROUP  # samples a second of one busy worker


class SlowWorker:
    """Any group takes a second; how many run at once is what its leases allow."""

    def __init__(self):
        self.version = None
        self.started, self.answered = Counter(), Counter()  # by ordinal
        self.running = self.most_running = 0

    async def load_weights(self, snapshot):
        self.version = snapshot.version
        return WeightsAck("", snapshot.version, 0.0, 0.0)

    async def ping(self, after_s=0.0):
        await asyncio.sleep(after_s)
        return Pulse("none")

    async def generate(self, request):
        self.started[request.ordinal] += 1
        self.running += request.num_samples
        self.most_running = max(self.most_running, self.running)
        version = self.version
        await asyncio.sleep(SECONDS_A_GROUP)
        self.running -= request.num_samples
        self.answered[request.ordinal] += 1
        return tuple(make_completion(version) for _ in range(request.num_samples))

    async def abort_all(self):
        raise AssertionError("nobody ends this run early")

    async def verify(self, request):
        return tuple(make_verdict(float(output.index)) for output in request.outputs)


class Elastic(Run):
    """A run that only generation holds up."""

    def __init__(self):
        self.config = make_config(
            batch_size=16,
            samples_per_question=GROUP,
            max_staleness=1,
            num_training_batches=12,
            max_tokens_per_gpu=1000,
        )
        self.script = Script(config=self.config, num_ranks=1, slowest_s=0.0)
        self.registry = WorkerRegistry(role_of(GENERATION))
        self.first, self.second = SlowWorker(), SlowWorker()
        plan = BatcherPlan(
            config=self.config,
            rules=LocalRules(find_algorithm(self.config)),
            questions=(make_question(),),
            held_out=(),
            order=lambda ordinal: 0,
            replacement=lambda slot, *, attempt: 0,
            seed_of=None,
            sampling=SamplingContract(1.0, (1,), self.config.sampling.max_generation_tokens),
            num_ranks=1,
            incarnation=INCARNATION,
        )
        registries = {GENERATION: self.registry, VERIFIER: Registry(self.first, role=VERIFIER)}
        self.served = ServedRun(plan, registries.__getitem__)
        self.batcher = self.served.batcher

    async def join(self, name, worker):
        info = WorkerInfo(name, GENERATION, "node", 0, "model", 64, capacity=CAPACITY,
                          overhead=0.0, max_model_len=64)  # fmt: skip
        await self.registry.register(info, Handle(worker))

    async def publish(self, batches):
        snapshot = WeightsSnapshot(WeightsVersion(INCARNATION, batches), ())
        await self.registry.publish(snapshot, timeout_s=10.0)
        await self.served.published(snapshot.version)

    async def finished_in(self, seconds):
        """Samples that were answered in the next `seconds`, by worker."""
        workers = (self.first, self.second)
        before = [worker.answered.total() for worker in workers]
        await asyncio.sleep(seconds)
        after = [worker.answered.total() for worker in workers]
        return [GROUP * (now - then) for then, now in zip(before, after, strict=True)]


async def scenario():
    elastic = Elastic()
    await elastic.join("first", elastic.first)
    training = asyncio.ensure_future(elastic.train())
    await asyncio.sleep(1.5)
    alone = await elastic.finished_in(10)
    await elastic.join("second", elastic.second)
    await asyncio.sleep(1.25)
    together = await elastic.finished_in(10)
    elastic.registry.drain("first")
    unfinished = elastic.first.running
    await asyncio.sleep(SECONDS_A_GROUP)
    drained = await elastic.finished_in(10)
    (items,) = await training
    return elastic, items, alone, together, unfinished, drained


def test_a_worker_added_in_mid_run_doubles_what_is_generated_and_draining_loses_nothing():
    elastic, items, alone, together, unfinished, drained = run(scenario())
    assert alone == [10 * RATE, 0]
    assert together == [10 * RATE, 10 * RATE]
    assert unfinished == CAPACITY
    assert drained == [0, 10 * RATE]
    assert elastic.first.most_running == elastic.second.most_running == CAPACITY
    started = elastic.first.started + elastic.second.started
    assert started == elastic.first.answered + elastic.second.answered
    assert set(started.values()) == {1}
    config = elastic.config
    assert sorted(started) == list(
        range(config.batching.batch_size * config.batching.num_training_batches)
    )
    ends = [item for item in items if hasattr(item, "fates")]
    assert [end.fates["trained"] for end in ends] == [64] * config.batching.num_training_batches
    assert max(end.sums["lag_max"] for end in ends) == 1
