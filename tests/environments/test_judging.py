"""Verdicts are read strictly; a judge that gives none, or fails, is an error, never a grade."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from players import Scripted, make_request, play
from two_turns import TwoTurns

from async_grpo.environments.base import EpisodeFailed, FailureClass
from async_grpo.environments.judging import choice, ranking, score
from async_grpo.types import JudgeAnswer, Verdict
from async_grpo.util.errors import ProcessLostError

LOST = ProcessLostError("the judge has died")
GOOD, BAD = "VERDICT: good", "Let me think.\nVERDICT: bad\n"
QUESTION = [{"role": "user", "content": "Is 20 right?"}]


class Court(Scripted):
    """A script of turns, and one of answers for each judge."""

    def __init__(self, *turns, **judges):
        super().__init__(*turns)
        self.judges = {name: list(answers) for name, answers in judges.items()}
        self.requests = []

    async def __call__(self, role, method, request, **where):
        if not role.startswith("judge:"):
            return await super().__call__(role, method, request, **where)
        self.requests.append(request)
        answer = self.judges[role.removeprefix("judge:")].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return JudgeAnswer(answer, 10)


class Judged(TwoTurns):
    """Each episode is as good as the share of the judges who call it so."""

    names = ("strict",)

    async def grade(self, question, episodes, services):
        graded = []
        for _ in episodes:
            said = await services.judge(self.names, QUESTION, form=choice("good", "bad"))
            reward = sum(verdict == "good" for verdict in said) / len(said)
            graded.append(Verdict.scored(reward, adapter="judge"))
        return graded


class Both(Judged):
    names = ("strict", "kind")


def judged(environment, court, num_samples=1):
    request = make_request(num_samples=num_samples, judges=("strict", "kind"))
    return asyncio.run(play(environment, court, request))


def test_an_answer_that_is_no_verdict_is_shown_to_its_judge_who_is_asked_again():
    court = Court([20], strict=["It is good.", BAD])
    played = judged(Judged(), court)
    assert [verdict.reward for verdict in played.verdicts] == [0.0]
    first, again = court.requests
    assert (first.is_again, again.is_again) == (False, True)
    assert first.messages[-1]["content"].startswith("Is 20 right?\n\nEnd your answer with one line")
    assert [message["role"] for message in again.messages] == ["user", "assistant", "user"]
    assert again.messages[1]["content"] == "It is good."
    assert again.messages[2]["content"].startswith("No verdict: 0 lines begin with VERDICT:")


def test_a_judge_that_never_gives_a_verdict_fails_the_group_as_the_judge_s():
    with pytest.raises(EpisodeFailed, match="judge strict gave no verdict 3 times") as caught:
        judged(Judged(), Court([20], strict=["good"] * 9))
    assert caught.value.failure is FailureClass.JUDGE


def test_a_judge_that_was_lost_is_asked_again_and_one_that_stays_away_is_no_grade():
    played = judged(Judged(), Court([20], strict=[LOST, LOST, GOOD]))
    assert [verdict.reward for verdict in played.verdicts] == [1.0]
    with pytest.raises(EpisodeFailed, match=r"judge strict failed 3 times.*has died") as caught:
        judged(Judged(), Court([20], strict=[LOST] * 9))
    assert caught.value.failure is FailureClass.JUDGE


def test_a_judge_that_the_run_does_not_name_is_refused_before_anybody_is_asked():
    class Elsewhere(Judged):
        names = ("unknown",)

    said = "judge 'unknown' must be one of --judges 'strict,kind': name it there"
    court = Court([20])
    with pytest.raises(EpisodeFailed, match=said):
        judged(Elsewhere(), court)
    assert court.requests == []


def test_the_disagreements_of_several_judges_are_counted():
    court = Court([20], [20], [20], strict=[GOOD, BAD, BAD], kind=[GOOD, GOOD, BAD])
    played = judged(Both(), court, num_samples=3)
    assert [verdict.reward for verdict in played.verdicts] == [1.0, 0.5, 0.0]
    assert (played.num_judged, played.num_disagreed) == (3, 1)


@given(st.lists(st.sampled_from(["VERDICT: 3", "I think 3", "VERDICT: 4", " VERDICT: 9"])))
def test_only_one_line_that_is_a_verdict_is_one(lines):
    verdicts = [line for line in lines if line.startswith("VERDICT:")]
    if len(verdicts) == 1:
        assert score(0, 10).verdict("\n".join(lines)) == float(verdicts[0][-1])
    else:
        with pytest.raises(ValueError, match=f"{len(verdicts)} lines begin"):
            score(0, 10).verdict("\n".join(lines))


@given(st.permutations(range(1, 6)))
def test_a_ranking_names_everybody_once(places):
    form = ranking(5)
    assert form.verdict(f"VERDICT: {', '.join(map(str, places))}") == tuple(places)
    for wrong in (places[:-1], [*places[:-1], places[0]], [*places, 6]):
        with pytest.raises(ValueError, match="the best first, got"):
            form.verdict(f"VERDICT: {', '.join(map(str, wrong))}")


@pytest.mark.parametrize("text", ["", "11", "-1", "nan", "1e1", "5 or 6", "good"])
def test_what_is_no_number_of_the_range_is_no_score(text):
    with pytest.raises(ValueError, match="must be a number from 0 to 10, got"):
        score(0, 10).verdict(f"VERDICT: {text}")
