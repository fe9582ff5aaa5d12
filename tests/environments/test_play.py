"""Errors of an episode are played again, then the group fails whole, by class: never a reward."""

import asyncio
import pickle
import time

import pytest
from players import Scripted, make_request, play
from two_turns import TwoTurns

from async_grpo.environments import play as module
from async_grpo.environments.base import Environment, EpisodeFailed, FailureClass
from async_grpo.environments.worker import EnvironmentWorker
from async_grpo.errors import DeadlineError, ProcessLostError, WorkerError
from async_grpo.types import Verdict
from async_grpo.user_code import UserCode

OWN = ZeroDivisionError("mine")
LOST = ProcessLostError("the engine has died")
ONE = make_request(num_samples=1)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(module, "AFTER_LOSS_S", 0.0)
    monkeypatch.setattr(module, "LOOK_INTERVAL_S", 0.01)


class Guess(TwoTurns):
    """Breaks in `play` as often as a test says, and in `grade`."""

    def __init__(self, *, times=0, error=OWN, verdicts=None):
        self.times, self.error, self.verdicts = times, error, verdicts

    async def play(self, question, policy, services):
        if self.times:
            self.times -= 1
            raise self.error
        return await super().play(question, policy, services)

    async def grade(self, question, episodes, services):
        if isinstance(self.verdicts, Exception):
            raise self.verdicts
        return self.verdicts or await super().grade(question, episodes, services)


def failure_of(environment, services, request=ONE):
    with pytest.raises(EpisodeFailed) as caught:
        asyncio.run(play(environment, services, request))
    return pickle.loads(pickle.dumps(caught.value))


def test_a_turn_that_its_engine_lost_is_sampled_again_and_the_episode_goes_on():
    services = Scripted([9], LOST, [20])
    (episode,) = asyncio.run(play(Guess(), services, ONE)).episodes
    assert [turn.token_ids.tolist() for turn in episode.turns] == [[9], [20]]
    histories = [history for history, _, _ in services.asked]
    assert histories == [[5, 6], [5, 6, 9, 60], [5, 6, 9, 60]]
    assert [prefer for *_, prefer in services.asked] == [None, "w1", "w1"]
    assert {sampling.max_tokens for _, sampling, _ in services.asked} == {4}


@pytest.mark.parametrize(
    ("error", "failure"),
    [(LOST, FailureClass.ENGINE), (DeadlineError("nobody is free"), FailureClass.DEADLINE)],
)
def test_an_engine_that_stays_away_fails_the_group_by_class(error, failure):
    found = failure_of(Guess(), Scripted(*[error] * 9))
    assert found.failure is failure
    assert f"a turn failed 3 times, the last time: {error}" in str(found)


def test_an_episode_whose_environment_fails_is_played_again_from_its_question():
    services = Scripted([20])
    played = asyncio.run(play(Guess(times=2), services, ONE))
    assert [history for history, _, _ in services.asked] == [[5, 6]]
    assert [verdict.reward for verdict in played.verdicts] == [1.0]


def test_an_environment_that_keeps_failing_is_named_with_its_line():
    found = failure_of(Guess(times=3), Scripted())
    assert found.failure is FailureClass.ENVIRONMENT
    assert "environment mine.py:Mine of question 7 raised ZeroDivisionError('mine') at" in str(
        found
    )
    assert "test_play.py" in str(found)


def test_an_environment_may_say_which_part_has_failed():
    down = EpisodeFailed(FailureClass.TOOL, "the search index is down")
    found = failure_of(Guess(times=3, error=down), Scripted())
    assert (found.failure, str(found)) == (FailureClass.TOOL, "the search index is down")


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [(ValueError("no judge"), "raised ValueError"), ([0.5], "must return 1 verdicts")],
)
def test_a_group_that_cannot_be_graded_fails_as_the_judge_s(verdicts, said):
    found = failure_of(Guess(verdicts=verdicts), Scripted([20]))
    assert found.failure is FailureClass.JUDGE
    assert said in str(found)


def test_an_environment_that_stalls_is_named_with_its_line():
    class Stalled(Environment):
        async def play(self, question, policy, services):
            await asyncio.sleep(60)

    request = make_request(num_samples=1, idle_timeout_s=0.05)
    started = time.monotonic()
    found = failure_of(Stalled(), Scripted(), request)
    assert time.monotonic() - started < 10
    assert found.failure is FailureClass.DEADLINE
    assert "mine.py:Mine of question 7 has asked for nothing for" in str(found)
    assert "test_play.py" in str(found)


def test_a_long_turn_is_no_stall():
    class Slow(Scripted):
        async def __call__(self, *asked, **where):
            await asyncio.sleep(0.3)
            return await super().__call__(*asked, **where)

    request = make_request(num_samples=1, idle_timeout_s=0.05)
    (episode,) = asyncio.run(play(Guess(), Slow([20]), request)).episodes
    assert episode.finish_reason == "stop"


def test_an_episode_whose_next_turn_may_not_fit_ends_with_length():
    request = make_request(num_samples=1, max_row_tokens=7)
    services = Scripted([9, 9, 9])
    (episode,) = asyncio.run(play(Guess(), services, request)).episodes
    assert (len(episode.turns), episode.finish_reason, len(services.asked)) == (1, "length", 1)


def test_a_question_without_room_for_one_turn_fails_the_environment():
    found = failure_of(Guess(), Scripted(), make_request(num_samples=1, max_row_tokens=5))
    assert found.failure is FailureClass.ENVIRONMENT
    assert "has no room: 2 tokens and an answer of up to 4 must fit 5" in str(found)


def test_what_is_no_episode_is_refused():
    class Wrong(Environment):
        async def play(self, question, policy, services):
            return None

    assert "must sample a turn and return policy.episode()" in str(failure_of(Wrong(), Scripted()))


def worker(ask):
    return EnvironmentWorker(
        lambda played, *asked, **where: ask(*asked, **where), worker_id="e0", capacity=4
    )


def test_a_worker_counts_a_turn_that_is_under_way_as_progress_and_ends_with_its_lease(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from two_turns import TwoTurns as Mine\n")

    class Never(Scripted):
        async def __call__(self, *asked, **where):
            await asyncio.Future()

    async def scenario():
        player = worker(Never())
        code = UserCode(f"{path}:Mine", path.read_text())
        request = make_request(environment=code, lease_id=3)
        playing = asyncio.create_task(player.play(request))
        await asyncio.sleep(0.05)
        pulses = [(await player.ping(0.02)).requests[3].num_tokens for _ in range(3)]
        await player.abort_all()
        await asyncio.gather(playing, return_exceptions=True)
        return pulses, playing.cancelled(), (await player.ping()).requests

    assert asyncio.run(scenario()) == ([1, 2, 3], True, {})


BLOCKS = """
import asyncio, time
from two_turns import TwoTurns
class Mine(TwoTurns):
    async def play(self, question, policy, services):
        turn = asyncio.ensure_future(policy.sample(question.input_token_ids))
        await asyncio.sleep(0)
        time.sleep(0.5)
        await turn
        return policy.episode()
"""


def while_it_blocks(pings, **fields):
    """What `pings` of a worker find whose environment blocks, and the group that it plays."""

    async def scenario():
        player = worker(Scripted([20]))
        request = make_request(environment=UserCode("/mine.py:Mine", BLOCKS), **fields)
        playing = asyncio.create_task(player.play(request))
        await asyncio.sleep(0.2)
        try:
            return await pings(player), await playing
        finally:
            playing.cancel()

    return asyncio.run(scenario())


def test_code_that_blocks_holds_up_no_ping_and_is_no_progress():
    async def pings(player):
        started = time.monotonic()
        pulses = [(await player.ping(0.02)).requests[3].num_tokens for _ in range(3)]
        return pulses, time.monotonic() - started

    (pulses, waited_s), played = while_it_blocks(pings, num_samples=1, lease_id=3)
    assert pulses == [1, 1, 1] and waited_s < 0.25  # of the 0.5 that it blocks
    assert [verdict.reward for verdict in played.verdicts] == [1.0]


def test_a_worker_whose_code_blocks_for_too_long_says_so_with_its_line():
    async def pings(player):
        for _ in range(5):
            await player.ping(0.02)

    said = r"/mine.py:Mine has held its worker for 0 s, in /mine.py:8, time.sleep\(0.5\): await"
    with pytest.raises(WorkerError, match=said):
        while_it_blocks(pings, num_samples=1, idle_timeout_s=0.03)


def test_a_group_is_graded_once_when_all_its_episodes_have_ended(tmp_path):
    graded = []

    class Ranked(TwoTurns):
        async def grade(self, question, episodes, services):
            graded.append(len(episodes))
            ranks = range(len(episodes))
            return [Verdict("scored", float(rank), None, "rank", "", 0.0) for rank in ranks]

    played = asyncio.run(play(Ranked(), Scripted([20], [20], [20], [20])))
    assert graded == [4]
    assert [verdict.reward for verdict in played.verdicts] == [0, 1, 2, 3]
