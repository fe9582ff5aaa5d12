"""A staleness that changes while a run trains: who starts when, and what the ends of steps tell."""

import asyncio

import pytest
from script import Script
from scripted import run
from scripted_run import Run, make_config, split_steps

from async_grpo.types import Control
from async_grpo.util.errors import ConfigError


def control(name, action="set", **settings):
    return Control(name, action, "somebody", "", settings)


def test_a_larger_staleness_starts_more_questions_at_once():
    running = Run(Script(config=make_config(max_staleness=1, num_training_batches=5)))

    async def scenario():
        await running.publish(0)
        await asyncio.sleep(100)  # nobody trains
        before = sorted(running.cluster.started)
        running.served.control(control("a", max_staleness=3))
        await asyncio.sleep(100)
        return before

    assert run(scenario()) == list(range(8))
    assert sorted(running.cluster.started) == list(range(16))
    assert [each.id for each in running.served.status().controls] == ["a"]


def test_every_rank_hears_of_a_request_with_the_end_of_the_same_batch():
    config = make_config(max_staleness=2, num_training_batches=8, train_minibatch_size=2)
    running = Run(Script(config=config, num_ranks=2, seed=4))

    publish = running.publish

    async def publish_and_ask(batches):
        await publish(batches)
        if batches == 2:
            running.served.control(control("a", max_staleness=1, learning_rate=1e-5))

    running.publish = publish_and_ask
    items = run(running.train())
    told = [
        [(e.batch, e.is_last_of_batch, [c.id for c in e.controls], e.settings)
         for _, e in split_steps(own)]
        for own in items
    ]  # fmt: skip
    assert told[0] == told[1]
    (heard,) = [batch for batch, _, ids, _ in told[0] if ids]
    for batch, is_last, ids, settings in told[0]:
        assert bool(ids) == (batch == heard and is_last)
        is_set = batch > heard or bool(ids)
        assert settings == ({"max_staleness": 1, "learning_rate": 1e-5} if is_set else {})
    ends = [end for _, end in split_steps(items[0])]
    assert max(end.sums["lag_max"] for end in ends if end.batch <= heard) == 2
    allowed = heard + 3  # those before had begun under the larger one
    assert max(end.sums["lag_max"] for end in ends if end.batch >= allowed) == 1
    assert all(
        published >= ordinal // 4 - 1
        for ordinal, published in running.cluster.started.items()
        if ordinal // 4 >= allowed
    )


def test_a_request_that_breaks_a_rule_changes_nothing():
    running = Run(Script(config=make_config(max_staleness=1)))

    async def scenario():
        await running.publish(0)
        with pytest.raises(ConfigError, match="must keep the ratio's denominator"):
            running.served.control(control("a", max_staleness=0))
        return running.served.status()

    assert run(scenario()).controls == ()
