"""A slot whose episodes an environment worker plays: what the pipeline asks of it and accepts."""

import asyncio
from pathlib import Path

import pytest
from players import Scripted, make_turn
from scripted import Registry
from scripted_run import make_config
from staged import OLDEST, QUESTION, REQUEST, STEP, make_books

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching import leased_work
from async_grpo.batching.leased_work import SlotFailed
from async_grpo.batching.pipeline import SlotPipeline
from async_grpo.batching.records import BatcherPlan
from async_grpo.config.roles import ENVIRONMENT
from async_grpo.environments.environment_worker import EnvironmentWorker
from async_grpo.environments.find import users_environment
from async_grpo.types import Episode, PlayedGroup, RunId, WeightsVersion
from async_grpo.util.errors import LossCause, ProcessLostError, WorkerError

HERE = Path(__file__).parent
CONFIG = make_config(max_generation_tokens=8, max_tokens_per_gpu=64)


@pytest.fixture(autouse=True)
def _leases_at_once(monkeypatch):
    monkeypatch.setattr(leased_work, "TRIES_AFTER_S", (0.0, 0.0, 0.0))


class Engine(Scripted):
    """Its turns are of the weights that a group may have, or of older ones."""

    version = OLDEST

    async def __call__(self, *asked, **where):
        (turn,) = await super().__call__(*asked, **where)
        return [make_turn(turn.token_ids, version=self.version)]


def run_slot(engine, environment=f"{HERE}/two_turns.py:TwoTurns", books=None, dies_after=0):
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
        environment=users_environment(environment),
        max_positions=40,
        epoch=3,
    )
    asked = {}

    async def ask(played, *request, **where):
        asked[played.lease_id] = played
        if dies_after and played.lease_id == 0 and len(engine.asked) >= dies_after:
            await asyncio.Future()
        turns = await engine(*request, **where)
        registry.open[played.lease_id].received(turns)
        if len(engine.asked) == dies_after:
            loop.call_soon_threadsafe(registry.lose, registry.name(0), LossCause.DIED, "killed")
            await asyncio.Future()
        return turns

    worker = EnvironmentWorker(ask, worker_id="e0", capacity=4)
    registry = Registry(worker, role=ENVIRONMENT)
    pipeline = SlotPipeline(plan, {ENVIRONMENT: registry}.__getitem__)
    books = books or make_books(REQUEST)
    playing = pipeline.run(QUESTION, REQUEST, STEP, oldest=OLDEST, account=books)
    with asyncio.Runner() as runner:  # by the clock of the world: the worker has its own thread
        loop = runner.get_loop()
        group = runner.run(playing)
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


def test_every_token_of_a_group_is_in_its_episodes():
    books = make_books(REQUEST)
    group, *_ = run_slot(Engine([4], [9], [2]), books=books)
    assert sum(sample.episode.num_sampled_tokens for sample in group.samples) == 3
    assert (books.ledger.tokens_in_flight(REQUEST.ordinal), books.ledger.output_tokens) == (3, 3)


BREAKS = """
from two_turns import TwoTurns
from async_grpo.environments.base import EpisodeFailed, FailureClass
class Breaks(TwoTurns):
    num_broken = 0
    async def play(self, question, policy, services):
        episode = await super().play(question, policy, services)
        if self.num_broken < TIMES:
            self.num_broken += 1
            raise EpisodeFailed(FailureClass.TOOL, "the index is down")
        return episode
"""


@pytest.fixture
def breaking(tmp_path):
    def write(times):
        path = tmp_path / "breaks.py"
        path.write_text(BREAKS.replace("TIMES", str(times)))
        return f"{path}:Breaks"

    return write


def test_a_group_of_which_a_state_is_lost_is_played_again_whole_and_counted_with_its_tokens(
    breaking,
):
    books = make_books(REQUEST)
    run_slot(Engine([4, 4], [4, 4], [4, 4], [4, 4]), breaking(1), books)
    fates = books.ledger.fates
    assert fates.reasons == {"discarded: environment: tool infrastructure": 2}  # the whole group
    assert fates.token_reasons == {"discarded: environment: tool infrastructure": 4}
    assert books.ledger.tokens_in_flight(REQUEST.ordinal) == 4
    assert books.resampled == {"environment: tool infrastructure": 1}


def test_the_tokens_of_a_worker_that_dies_are_discarded_and_sampled_again(monkeypatch):
    monkeypatch.setattr(leased_work, "AFTER_LOSS_S", 0.0)
    books = make_books(REQUEST)
    engine = Engine([9, 9], [9, 9, 9], [4], [4, 4], [4, 4])
    group, registry, _ = run_slot(engine, books=books, dies_after=2)
    assert len(registry.asked) == 2
    assert books.ledger.fates.reasons == {"discarded: worker died": 2}
    assert books.ledger.fates.token_reasons == {"discarded: worker died": 5}
    kept = sum(sample.episode.num_sampled_tokens for sample in group.samples)
    assert books.ledger.tokens_in_flight(REQUEST.ordinal) == kept
    assert books.ledger.output_tokens == kept + 5


def test_a_group_whose_state_is_lost_twice_fails_whole(breaking):
    books = make_books(REQUEST)
    with pytest.raises(SlotFailed) as caught:
        run_slot(Engine(*[[4]] * 9), breaking(9), books)
    assert caught.value.stage == "environment: tool infrastructure"
    assert books.ledger.fates.samples == {"discarded": 2}  # of the first time
    books.ledger.settle(REQUEST.ordinal, fate="failed", reason="tool")
    books.ledger.check()
    assert not books.ledger.open_slots


def test_a_turn_that_is_in_no_episode_is_counted(tmp_path):
    path = tmp_path / "aside.py"
    path.write_text(
        "from two_turns import TwoTurns\n"
        "class Aside(TwoTurns):\n"
        "    async def play(self, question, policy, services):\n"
        "        cut = lambda turn: turn.stopped(1, text='')\n"
        "        await policy.sample(question.input_token_ids, cut=cut)\n"
        "        return policy.episode()\n"
    )
    books = make_books(REQUEST)
    run_slot(Engine([4, 4, 4], [9, 9]), f"{path}:Aside", books)
    assert books.ledger.fates.token_reasons == {"discarded: unused": 3}
    assert books.ledger.fates.samples == {}


def test_episodes_with_more_tokens_than_were_sampled_for_them_are_refused():
    books = make_books(REQUEST)
    books.received([make_turn([4])])
    episode = Episode.of_turn(QUESTION.input_token_ids, make_turn([4, 5]))
    with pytest.raises(WorkerError, match=r"2 tokens came .* engines have sampled 1 for them"):
        books.played(PlayedGroup((episode,), ()))
