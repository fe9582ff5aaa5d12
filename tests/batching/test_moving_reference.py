"""The moving reference through a whole run: the real batcher, registry and schedule together.

Batch b must be scored by version N * floor(max(0, b - S) / N), by nothing older and nothing newer.
"""

import asyncio
from itertools import product

import pytest
from scripted import Handle, run
from scripted_run import INCARNATION, Run, Script, make_config

from async_grpo.config.roles import REFERENCE, role_of
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.types import Pulse, WeightsAck, WeightsSnapshot, WeightsVersion, WorkerInfo
from async_grpo.util.errors import StaleAnswerError
from async_grpo.weight_sync.reference_schedule import ReferenceSchedule

NUM_BATCHES = 9
NOBODY_SERVES = r"within 60 s for weights 5\.[12]: 1 registered, weights published: 5\.0"
CASES = list(product(range(4), range(1, 5)))


def needed(batch, *, staleness, period):
    """The design's formula, written again."""
    return period * (max(0, batch - staleness) // period)


class ReferenceWorker:
    """Serves exactly one version, like the real one; a change of weights takes its time."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.version = None
        self.loaded = []
        self.asked = []  # (batches completed, version) of every request
        self.stale = 0

    async def ping(self, after_s=0.0):
        await asyncio.sleep(after_s)
        return Pulse(str(self.version))

    async def abort_all(self):
        pass

    async def load_weights(self, snapshot):
        await asyncio.sleep(0.5)
        self.version = snapshot.version
        self.loaded.append(snapshot.version.batches)
        return WeightsAck("reference", snapshot.version, 0.5, 0.0)

    async def logprobs(self, request):
        await asyncio.sleep(0)
        if request.version != self.version:
            self.stale += 1
            raise StaleAnswerError(f"{request.version} were asked, {self.version} are served")
        return await self.cluster.logprobs(request)


class MovingRun(Run):
    """A run whose reference gets its weights as the trainer's thread announces them."""

    def __init__(self, script):
        super().__init__(script)
        self.schedule = ReferenceSchedule(script.config.sampling)
        self.worker = ReferenceWorker(self.cluster)
        self.announced = {}  # version -> batches completed when it was announced

    def make_reference(self):
        self.registry = WorkerRegistry(role_of(REFERENCE))
        return self.registry

    async def publish(self, batches):
        snapshot = WeightsSnapshot(WeightsVersion(INCARNATION, batches), ())
        self.cluster.version = snapshot.version
        due = self.schedule.completed(snapshot)
        if due is not None:
            self.announced[due.version.batches] = batches
            report = await self.registry.publish(due, timeout_s=60.0)
            assert len(report.acks) == 1
        await self.served.published(snapshot.version)

    async def train(self):
        info = WorkerInfo("reference", REFERENCE, "", 0, "", 8, 10_000.0, 0.0, 8)
        await self.registry.register(info, Handle(self.worker))
        return await super().train()


def config_of(max_staleness, period):
    return make_config(
        kl_coefficient=0.1,
        num_training_batches=NUM_BATCHES,
        max_staleness=max_staleness,
        num_batches_per_ref_model_update=period,
        batch_size=2,
    )


def moving_run(staleness, period, seed=0):
    return MovingRun(Script(config=config_of(staleness, period), seed=seed))


@pytest.mark.parametrize(("staleness", "period"), CASES)
def test_every_batch_is_scored_by_the_reference_of_the_formula(staleness, period):
    running = moving_run(staleness, period)
    run(running.train())
    expected = [needed(batch, staleness=staleness, period=period) for batch in range(NUM_BATCHES)]
    assert sorted(running.cluster.references) == sorted(expected * 2)
    assert running.worker.stale == 0, "a reference was replaced while a batch still needed it"


@pytest.mark.parametrize(("staleness", "period"), CASES)
def test_a_reference_is_announced_when_no_older_one_is_needed_and_not_later(staleness, period):
    running = moving_run(staleness, period, seed=1)
    run(running.train())
    versions = range(0, NUM_BATCHES + 1 - staleness, period)
    assert running.worker.loaded == list(versions)
    for version, completed in running.announced.items():
        waiting = range(completed, NUM_BATCHES)
        still_needed = [needed(batch, staleness=staleness, period=period) for batch in waiting]
        assert min(still_needed, default=version) >= version
        if version:  # one batch earlier it would have been too early
            last = needed(completed - 1, staleness=staleness, period=period)
            assert last < version


def test_snapshots_are_let_go_when_the_reference_has_them():
    schedule = ReferenceSchedule(config_of(period=2, max_staleness=3).sampling)
    for batches in range(40):
        schedule.completed(WeightsSnapshot(WeightsVersion(0, batches), ()))
        assert len(schedule._kept) <= 2


def serve(schedule, batches, served):
    """What the reference serves once so many batches are completed."""
    due = schedule.completed(WeightsSnapshot(WeightsVersion(0, batches), ()))
    return served if due is None else due.version.batches


@pytest.mark.parametrize("staleness", range(4))
@pytest.mark.parametrize("period", range(1, 5))
@pytest.mark.parametrize("resumed_at", range(1, 10))
def test_a_resumed_run_serves_the_references_of_one_that_went_on(staleness, period, resumed_at):
    """From what a checkpoint holds, the model folder (version 0) and the policy itself."""
    options = {"period": period, "max_staleness": staleness}
    alone, resumed = (ReferenceSchedule(config_of(**options).sampling) for _ in range(2))
    served = None
    for batches in range(resumed_at + 1):
        served = serve(alone, batches, served)
    saved = alone.to_save(resumed_at)
    assert all(0 < snapshot.version.batches < resumed_at for snapshot in saved)
    assert len(saved) <= 1 + -(-max(staleness - 1, 0) // period)
    folder = [WeightsSnapshot(WeightsVersion(0, 0), ())] if served == 0 else []
    for snapshot in (*saved, *folder):
        resumed.restore(snapshot)
    again = serve(resumed, resumed_at, None)
    assert again == served == needed(resumed_at, staleness=staleness, period=period)
    for batches in range(resumed_at + 1, resumed_at + 10):
        served, again = serve(alone, batches, served), serve(resumed, batches, again)
        assert again == served


def test_a_reference_that_never_comes_ends_the_run_by_name():
    running = moving_run(1, 1)
    running.schedule.completed = lambda snapshot: None if snapshot.version.batches else snapshot
    with pytest.raises(Exception, match=NOBODY_SERVES):
        run(running.train())


def test_the_fixture_would_notice_a_reference_that_comes_too_early():
    running = moving_run(1, 1)
    running.schedule = ReferenceSchedule(config_of(period=1, max_staleness=0).sampling)
    run(running.train())
    assert running.worker.stale


class SlowTrainer(Script):
    """A minibatch takes its trainer longer than a stall may last."""

    def seconds(self, *key):
        return 5 * 100.0 if key[0] == "train" else super().seconds(*key)


def test_a_reference_may_wait_for_a_slow_trainer_that_moves():
    script = SlowTrainer(config=moving_run(1, 1).config)
    running = MovingRun(script)
    run(running.train(), limit_s=100_000)
    assert running.worker.stale == 0
    assert max(running.worker.loaded) == NUM_BATCHES - 1
