"""Whole runs whose engines and ranks share devices in turns, in a loop whose clock jumps."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from effort import histories
from hypothesis import given, settings
from hypothesis import strategies as st
from script import Script
from scripted import Registry, make_question, run
from scripted_run import Run, make_config, split_steps
from test_histories import many, quiet, samples_of, scripts  # noqa: F401

from async_grpo.batching.admission import Turns
from async_grpo.batching.ledger import FATES
from async_grpo.config.train_config import TrainConfig
from async_grpo.types import EndOfStep, Minibatch
from async_grpo.util.errors import ConfigError

FALLING_ASLEEP_S = 2.0


class Sleepers(Registry):
    """Engines that are found out when they work asleep, or are awake beside ranks."""

    awake, num_rests = False, 0  # the ranks have the devices when a run begins

    def lease(self, *args, **options):
        assert self.awake, "a lease on an engine that sleeps"
        return super().lease(*args, **options)

    async def rest(self):
        assert self.awake
        assert not self.open, "an engine sleeps under a lease"
        self.num_rests += 1
        await asyncio.sleep(FALLING_ASLEEP_S)
        self.awake = False


class Colocated(Run):
    """Ranks that leave the devices together, before rank 0 has the engines wake."""

    def __init__(self, script, **options):
        super().__init__(script, **options)
        self.generation = self.cluster.registry = Sleepers(self.cluster, self.cluster)
        self.serve()
        self.left = asyncio.Barrier(script.num_ranks)
        self.num_on_devices = 0

    async def publish(self, batches):
        assert not self.num_on_devices, "the engines wake beside ranks"
        self.generation.awake = True
        await super().publish(batches)

    async def rank(self, rank):
        items, published, is_on = [], None, False
        async for answer, asked in self.answers(rank):
            assert not self.generation.awake, "a rank trains beside engines that are awake"
            assert not self.batcher._slots.num_unsettled, "a batch that may start is not finished"
            self.num_on_devices += not is_on
            is_on = True
            items += answer
            if isinstance(answer[0], Minibatch):
                await asyncio.sleep(self.script.seconds("train", rank, len(items)) / 5)
            end = answer[-1]
            if isinstance(end, EndOfStep) and end.is_last_of_batch:
                self.num_on_devices -= 1
                is_on = False
                await self.left.wait()
                published = asyncio.ensure_future(self.publish(end.batch + 1)) if not rank else None
                if end.batch + 1 == self.config.batching.num_training_batches:
                    asked.cancel()
                    break
        if published:
            await published
        return items


@pytest.mark.timeout(1800)
@many(histories(50))
@given(scripts(), st.integers(0, 1))
def test_engines_and_ranks_never_have_the_devices_together_and_every_sample_has_one_fate(
    script, max_staleness
):
    config = script.config.but(colocated=True, max_staleness=max_staleness)
    script = replace(script, config=config)
    running = Colocated(script)
    ranks = list(map(split_steps, run(running.train())))
    batching = script.config.batching
    num_steps = batching.num_training_batches * batching.steps_per_batch
    assert {len(own) for own in ranks} == {num_steps}
    fates = Counter()
    for number in range(num_steps):
        _, end = ranks[0][number]
        fates.update(end.fates)
        keys = {(sample.ordinal, sample.index) for sample in samples_of(ranks, number)}
        assert len(keys) == end.fates["trained"]
    assert set(fates) == set(FATES)
    assert running.generation.num_rests == batching.num_training_batches
    assert running.generation.awake  # for whoever evaluates the last weights


def test_engines_stay_awake_until_an_evaluation_of_their_weights_has_ended():
    config = make_config(
        colocated=True, max_staleness=0, num_training_batches=2, eval_data_path="e",
        eval_every_batches=1, samples_per_question=4,
    )  # fmt: skip
    held_out = tuple(make_question() for _ in range(60))  # longer than a batch
    running = Colocated(Script(config=config), held_out=held_out)

    async def scenario():
        ranks = await running.train()
        return ranks, await running.served.evaluations.finished()

    (items, *_), last = run(scenario())
    ends = [item for item in items if isinstance(item, EndOfStep)]
    results = [result for end in ends for result in end.evaluations] + [*last]
    assert [result.version.batches for result in results] == [0, 1, 2]
    assert {result.num_failed for result in results} == {0}
    assert {result.skipped for result in results} == {""}


@given(st.integers(1, 5), st.integers(0, 1), st.data())
@settings(max_examples=histories(200), deadline=None)
def test_in_any_order_of_events_one_side_may_always_go_on_and_never_both(batches, staleness, data):
    turns, awake, parked = Turns(num_batches=batches, num_ended=0), False, False
    published, unsettled = -1, 0
    while published < batches:
        allowed = []
        if not parked and not turns.is_of_ranks:  # a batch is trained, or none yet
            allowed.append("publish")
        if unsettled:
            allowed.append("settle")
        if turns.engines_are_done(num_unsettled=unsettled):
            allowed.append("sleep")
        if turns.is_of_ranks:
            allowed.append("train")
        assert allowed, "nobody may go on"
        event = data.draw(st.sampled_from(allowed))
        if event == "publish":  # of ranks that have left
            parked, awake, published = True, True, turns.num_ended
            before = min(published + staleness, batches) if published else 0
            unsettled += min(published + staleness + 1, batches) - before
            turns.published(published)
        elif event == "settle":
            assert awake, "an engine samples asleep"
            unsettled -= 1
        elif event == "sleep":
            awake = False
            turns.slept()
        else:
            assert not awake, "both are awake"
            parked = False
            turns.batch_ended()
    assert turns.num_ended == batches


def test_more_staleness_than_one_batch_is_refused():
    with pytest.raises(ConfigError, match=r"--max-staleness must be at most 1 with --colocated"):
        make_config(colocated=True, max_staleness=2).check_sampling()
    with pytest.raises(ConfigError, match=r"--weight-transport must be object_store"):
        TrainConfig(model_name_or_path="m", data_path="d", colocated=True, weight_transport="nccl")
