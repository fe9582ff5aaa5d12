"""Errors before the first turn are tried again, else the group fails whole: never a reward."""

import asyncio
import pickle
import time
from dataclasses import replace

import numpy as np
import pytest
from players import Scripted, make_request, play
from two_turns import TwoTurns

from async_grpo.environments import play as module
from async_grpo.environments.base import Environment, EpisodeFailed, FailureClass
from async_grpo.environments.environment_worker import EnvironmentWorker
from async_grpo.environments.find import make_environment
from async_grpo.types import Verdict
from async_grpo.util.errors import DeadlineError, ProcessLostError, WorkerError
from async_grpo.util.user_code import UserCode

OWN = ZeroDivisionError("mine")
LOST = ProcessLostError("the engine has died")
ONE = make_request(num_samples=1)


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


def test_a_long_reason_keeps_who_has_failed_and_the_end_which_names_the_error():
    said = "Traceback (most recent call last): " + "File x.py, line 1, in f " * 80
    said = f"agent python mine.py exited with 1: {said}openai.NotFoundError: 404"
    found = failure_of(Guess(times=3, error=EpisodeFailed(FailureClass.ENVIRONMENT, said)), ONE)
    assert str(found).startswith("agent python mine.py exited with 1: Traceback")
    assert str(found).endswith("openai.NotFoundError: 404")
    assert len(str(found)) < module.MAX_REASON_CHARACTERS + 20


def test_what_an_author_says_has_failed_is_told_with_the_line(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from async_grpo.environments.base import Environment, EpisodeFailed\n"
        "class Mine(Environment):\n"
        "    async def play(self, question, policy, services):\n"
        "        raise EpisodeFailed('tool infrastructure', 'the index is down')\n"
    )
    code = UserCode(f"{path}:Mine", path.read_text())
    found = failure_of(make_environment(code), ONE, replace(ONE, environment=code))
    assert str(found).startswith(f"the index is down at {path}:4, raise EpisodeFailed(")
    assert found.place.startswith(f"EpisodeFailed {path}:4, ")


def test_an_environment_may_say_which_part_has_failed():
    down = EpisodeFailed(FailureClass.TOOL, "the search index is down")
    found = failure_of(Guess(times=3, error=down), Scripted())
    assert (found.failure, str(found)) == (FailureClass.TOOL, "the search index is down")


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        (ValueError("no judge"), "raised ValueError"),
        ([0.5], "a verdict must be a Verdict"),
        (
            [Verdict("good", 0.5, None, "", "", 0.0)],
            "a verdict must be a Verdict of",
        ),
        ([Verdict.scored(float("nan"))], "a reward must be finite, got nan"),
        ([Verdict.scored(0.5)] * 2, "must return 1 verdicts"),
    ],
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


def test_waiting_for_the_tokenizer_is_no_stall():
    class Chats(Guess):
        async def play(self, question, policy, services):
            await services.dialogue()
            return await super().play(question, policy, services)

    request = replace(ONE, idle_timeout_s=0.05)
    group = module.GroupPlay(request, Scripted([20]), lambda model, name: time.sleep(0.3))
    (episode,) = asyncio.run(group.run(Chats())).episodes
    assert len(episode.turns) == 1


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


class Slow(Scripted):
    async def __call__(self, *asked, **where):
        await asyncio.sleep(0.2)
        return await super().__call__(*asked, **where)


@pytest.mark.parametrize("name", ["turn_timeout_s", "episode_timeout_s"])
def test_what_takes_longer_than_the_user_wants_is_dropped_without_another_try(name):
    services = Slow(*[[9]] * 9)
    found = failure_of(Guess(), services, make_request(num_samples=1, **{name: 0.05}))
    assert found.failure is FailureClass.TIMEOUT
    assert f"took longer than --{name.replace('_', '-')} 0.05" in str(found)
    assert len(services.asked) == 0 == len(found.again)
    played = asyncio.run(play(Guess(), Slow([20]), make_request(num_samples=1, **{name: 60.0})))
    assert len(played.episodes) == 1


class Own(EpisodeFailed):
    """Whoever gets it may not know this class."""


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (Own("my failure", "x" * 10_000), FailureClass.ENVIRONMENT),
        (Own(FailureClass.TOOL, "gone"), FailureClass.TOOL),
        (SystemExit(3), FailureClass.ENVIRONMENT),
        (OSError("mine"), FailureClass.ENVIRONMENT),
    ],
)
def test_whatever_an_environment_raises_leaves_its_process_as_a_failure_of_a_known_class(
    error, failure
):
    found = failure_of(Guess(times=3, error=error), Scripted())
    assert (type(found), found.failure) == (EpisodeFailed, failure)
    assert len(str(found)) < 1000


def test_turns_of_a_seeded_group_have_seeds_of_their_own_that_are_always_the_same():
    class Seeded(Scripted):
        async def __call__(self, role, method, request, **where):
            seeds.append(request.seed)
            return await super().__call__(role, method, request, **where)

    found = []
    for _ in range(2):
        seeds = []
        request = make_request(num_samples=2, seed=5)
        asyncio.run(play(Guess(), Seeded([9], [9], [8], [8]), request))
        found.append(seeds)
    assert found[0] == found[1] and len(set(found[0])) == 4


def changed(change):
    class Changed(TwoTurns):
        async def play(self, question, policy, services):
            turn = await policy.sample(question.input_token_ids)
            await policy.sample([*question.input_token_ids, *turn.token_ids, 60])
            episode = policy.episode()
            (row,) = episode.rows
            return replace(episode, rows=change(row))

    return Changed()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: (), "there are 1 rows, it returned 0"),
        (
            lambda row: (replace(row, token_ids=row.token_ids + 1),),
            "the tokens of row 0 are others, or do not extend its prompt",
        ),
        (
            lambda row: (replace(row, loss_mask=np.ones(3, bool)),),
            "row 0 would train 1 tokens that the model only read",
        ),
    ],
)
def test_rows_that_are_not_what_was_sampled_fail_the_environment(change, said):
    found = failure_of(changed(change), Scripted(*[[9]] * 6))
    assert found.failure is FailureClass.ENVIRONMENT
    assert f"must return policy.episode(), whose rows are what was sampled: {said}" in str(found)
    assert found.again == {}  # two turns were sampled: it is not begun again


def test_an_environment_may_mask_what_it_does_not_want_trained():
    masked = changed(lambda row: (replace(row, loss_mask=row.loss_mask & False),))
    (episode,) = asyncio.run(play(masked, Scripted([9], [20]), ONE)).episodes
    assert episode.rows[0].num_trained_tokens == 0 < episode.num_sampled_tokens


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
            return [Verdict.scored(rank, adapter="rank") for rank in ranks]

    played = asyncio.run(play(Ranked(), Scripted([20], [20], [20], [20])))
    assert graded == [4]
    assert [verdict.reward for verdict in played.verdicts] == [0, 1, 2, 3]
