"""A slot whose episodes an environment worker plays: what the pipeline asks of it and accepts."""

import asyncio
from pathlib import Path

import pytest
from players import Scripted, make_turn
from scripted import Registry
from scripted_run import make_config
from staged import OLDEST, QUESTION, REFERENCE, REQUEST

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching import leased_work
from async_grpo.batching.leased_work import SlotFailed
from async_grpo.batching.pipeline import SlotPipeline
from async_grpo.batching.quarantine import Quarantine
from async_grpo.batching.records import BatcherPlan
from async_grpo.environments import play
from async_grpo.environments.find import users_environment
from async_grpo.environments.worker import EnvironmentWorker
from async_grpo.errors import ProcessLostError
from async_grpo.roles import ENVIRONMENT
from async_grpo.types import RunId, WeightsVersion

HERE = Path(__file__).parent
CONFIG = make_config(max_generation_tokens=8, max_tokens_per_gpu=64)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(play, "AFTER_LOSS_S", 0.0)
    monkeypatch.setattr(leased_work, "TRIES_AFTER_S", (0.0, 0.0, 0.0))


class Engine(Scripted):
    """Its turns are of the weights that a group may have, or of older ones."""

    version = OLDEST

    async def __call__(self, *asked, **where):
        (turn,) = await super().__call__(*asked, **where)
        return [make_turn(turn.token_ids, version=self.version)]


def run_slot(engine):
    """(the finished group, the registry of environments, what the worker was asked)."""
    plan = BatcherPlan(
        config=CONFIG,
        questions=(QUESTION,),
        held_out=(),
        order=abs,
        replacement=max,
        seed_of=None,
        sampling=REQUEST.sampling,
        num_ranks=1,
        incarnation=OLDEST.incarnation,
        rules=LocalRules(find_algorithm(CONFIG)),
        environment=users_environment(f"{HERE}/two_turns.py:TwoTurns"),
        max_positions=40,
        epoch=3,
    )
    asked = {}

    async def ask(played, *request, **where):
        asked[played.lease_id] = played
        return await engine(*request, **where)

    worker = EnvironmentWorker(ask, worker_id="e0", capacity=4)
    registry = Registry(worker, role=ENVIRONMENT)
    pipeline = SlotPipeline(
        {ENVIRONMENT: registry}.__getitem__,
        config=CONFIG,
        rules=plan.rules,
        quarantine=Quarantine(),
        episodes_request=plan.episodes_request,
    )
    playing = pipeline.run(QUESTION, REQUEST, oldest=OLDEST, reference=REFERENCE, join_step=None)
    group = asyncio.run(playing)  # by the clock of the world: the worker has a thread of its own
    assert not registry.open
    return group, registry, asked.values()


def test_a_group_is_played_under_one_lease_and_is_finished_like_any_other():
    group, registry, (asked,) = run_slot(Engine([4], [9], [2]))
    assert registry.asked == [(2, None)]  # episodes
    assert (asked.run, asked.max_row_tokens) == (RunId(OLDEST.incarnation, 3), 40)
    assert [len(sample.episode.turns) for sample in group.samples] == [1, 2]
    assert [sample.verdict.reward for sample in group.samples] == [1.0, 1 - 2 / 64]
    assert group.samples[0].advantage > 0 > group.samples[1].advantage


def test_a_group_that_cannot_be_played_is_lost_by_the_class_of_its_failure():
    with pytest.raises(SlotFailed, match="a turn failed 3 times") as caught:
        run_slot(Engine(*[ProcessLostError("the engine has died")] * 40))
    assert caught.value.stage == "environment: engine"


def test_turns_of_older_weights_than_the_slot_may_have_are_refused():
    class Late(Engine):
        version = WeightsVersion(OLDEST.incarnation, OLDEST.batches - 1)

    with pytest.raises(SlotFailed, match="or later were asked") as caught:
        run_slot(Late(*[[4]] * 40))
    assert caught.value.stage == "environment"
