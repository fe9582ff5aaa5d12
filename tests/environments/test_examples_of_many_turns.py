"""The text game and the simulated user of examples/, played with scripted turns."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from families import tokenizer_of
from hypothesis import given
from hypothesis import strategies as st
from players import Scripted, make_request, play

from async_grpo.environments.base import Environment, EpisodeFailed, FailureClass
from async_grpo.environments.chat.template import TemplateRenderer
from async_grpo.types import JudgeAnswer, Question, SamplingContract
from async_grpo.util.errors import ProcessLostError
from async_grpo.util.user_code import UserCode

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENIZER = tokenizer_of("qwen2_5")


def example(name):
    read = UserCode.read(f"{EXAMPLES}/{name}", option="--environment", shipped=())
    return read.load(Environment)


HUNT = example("treasure_hunt.py:TreasureHunt")
HOUSE = HUNT.play.__globals__["House"]
USER = example("simulated_user.py:SimulatedUser")


class Speaking(Scripted):
    """Says texts, and has judges of its own."""

    def __init__(self, *texts, judge=()):
        ids = (TOKENIZER(f"{text}<|im_end|>")["input_ids"] for text in texts)
        super().__init__(*ids)
        self.judge, self.heard = list(judge), []

    async def __call__(self, role, method, request, **where):
        if role.startswith("judge:"):
            self.heard.append(request.messages)
            answer = self.judge.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return JudgeAnswer(answer, 1)
        (turn,) = await super().__call__(role, method, request, **where)
        return [replace(turn, text=TOKENIZER.decode(turn.token_ids, skip_special_tokens=True))]


def played(environment, speaking, **columns):
    question = Question(np.array([1], np.int32), "a joke", None, columns)
    request = make_request(
        question,
        num_samples=1,
        max_row_tokens=100_000,
        sampling=SamplingContract(1.0, (), 200),
        judges=("user",),
    )
    renderer = TemplateRenderer(TOKENIZER)
    group = asyncio.run(play(environment(), speaking, request, renderer=renderer))
    return group.episodes[0], group.verdicts[0].reward


def way(house, room, before=0):
    """The rooms from this one to the treasure; none: it is not behind here."""
    if room == house.treasure:
        return [room]
    for door in house.doors[room]:
        if door != before and (rest := way(house, door, room)):
            return [room, *rest]
    return []


@given(seed=st.integers(0, 2**31), rooms=st.integers(2, 12))
def test_every_house_is_the_same_again_and_its_treasure_is_reached(seed, rooms):
    house = HOUSE.of(seed, rooms)
    assert house == HOUSE.of(seed, rooms)
    assert 1 < len(way(house, 1)) < 2 * rooms


def test_the_treasure_is_won_in_one_row_of_many_turns():
    rooms = way(HOUSE.of(3, 8), 1)
    turns = [*(f"I go {room}" for room in rooms[1:]), "take"]
    episode, reward = played(HUNT, Speaking(*turns, "never said"), seed=3, rooms=8)
    assert (reward, len(episode.turns), len(episode.rows)) == (1.0, len(turns), 1)


def test_mistakes_cost_moves_and_an_endless_walk_has_an_end():
    lost = ["what?", "go 99", "take", f"go {'9' * 50}"] * 3
    episode, reward = played(HUNT, Speaking(*lost), seed=3, rooms=6)
    assert (reward, len(episode.turns)) == (0.0, 12)
    said = TOKENIZER.decode(episode.rows[0].token_ids)
    for heard in ("Write `go N` or `take`.", "There is no door to 99.", "There is nothing here."):
        assert heard in said


def test_a_user_of_a_judge_s_model_speaks_until_it_has_what_it_wants():
    judge = ["Tell me a joke", "Another one", "DONE", "VERDICT: 7"]
    speaking = Speaking("Ha", "Ho", judge=judge)
    episode, reward = played(USER, speaking)
    assert (reward, len(episode.turns), len(episode.rows)) == (0.7, 2, 1)
    said = TOKENIZER.decode(episode.rows[0].token_ids[~episode.rows[0].loss_mask])
    assert "Another one" in said and "a joke" not in said
    roles = [message["role"] for message in speaking.heard[1]]
    assert roles == ["system", "user", "assistant", "user"]
    assert "Assistant: Ha\nAssistant: Ho" in speaking.heard[-1][0]["content"]


def test_a_user_whose_model_is_lost_is_an_error_and_no_low_score():
    lost = [ProcessLostError("the judge has died")] * 9
    with pytest.raises(EpisodeFailed, match="judge user failed 3 times") as caught:
        played(USER, Speaking(judge=lost))
    assert caught.value.failure is FailureClass.JUDGE
