"""A model that calls tools, played with scripted turns by the example of countdown."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from families import tokenizer_of
from players import Scripted, make_request, play

from async_grpo.environments.base import EpisodeFailed, FailureClass
from async_grpo.environments.chat.template import TemplateRenderer
from async_grpo.environments.tools.environment import ToolEnvironment
from async_grpo.environments.tools.function import tool
from async_grpo.environments.tools.toolbox import Toolbox
from async_grpo.types import Question, SamplingContract, Verdict
from async_grpo.util.user_code import UserCode

EXAMPLE = Path(__file__).parents[3] / "examples" / "countdown_calculator.py"
TOKENIZER = tokenizer_of("qwen2_5")


def said(text):
    return TOKENIZER(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]


def call(name, arguments):
    return said(f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>')


def played(environment, *turns, num_samples=1):
    environment.grade = graded
    question = Question(np.array([1], np.int32), "use 2 9 8 to make 15", "15", {})
    request = make_request(
        question,
        num_samples=num_samples,
        max_row_tokens=100_000,
        sampling=SamplingContract(1.0, (), 200),
    )
    renderer = TemplateRenderer(TOKENIZER)
    script = Scripted(*turns)
    group = asyncio.run(play(environment, script, request, renderer=renderer))
    return group.episodes[0], script


async def graded(question, episodes, services):
    return [Verdict.scored(1.0)] * len(episodes)


def example():
    read = UserCode.read(f"{EXAMPLE}:CountdownCalculator", option="--environment", shipped=())
    return read.load(ToolEnvironment)()


def test_a_model_reads_what_its_calls_gave_in_one_row():
    turns = [call("calculate", '{"expression": "8-2+9"}'), said("8-2+9=15")]
    episode, script = played(example(), *turns)
    (row,) = episode.rows
    first, second = (history for history, *_ in script.asked)
    assert second[: len(first) + len(turns[0])] == [*first, *turns[0]]
    assert "<tool_response>\n15\n</tool_response>" in TOKENIZER.decode(second)
    assert row.token_ids[row.loss_mask].tolist() == [*turns[0], *turns[1]]
    assert [*row.prompt_token_ids, *row.token_ids] == [*second, *turns[1]]


@pytest.mark.parametrize(
    ("turn", "read"),
    [
        (call("calculate", '{"expression": "import os"}'), "no expression"),
        (call("calculate", '{"expression": "1/0"}'), "divides by zero"),
        (call("calculate", "{"), "no JSON"),
        (call("compute", "{}"), "there is no tool"),
    ],
)
def test_a_wrong_call_is_told_and_the_episode_goes_on(turn, read):
    episode, script = played(example(), turn, said("5"))
    assert read in TOKENIZER.decode(script.asked[1][0])
    assert len(episode.turns) == 2


def test_an_episode_ends_when_its_turns_are_used_up():
    again = call("calculate", '{"expression": "1+1"}')
    episode, _ = played(example(), *[again] * 9)
    assert len(episode.turns) == 4


def test_a_last_turn_reads_that_there_are_no_calls_left_and_carries_none_out():
    again = call("calculate", '{"expression": "1+1"}')
    environment = example()
    environment.last_turn = "No calls are left: answer."
    episode, script = played(environment, *[again] * 4, said("2"))
    assert len(episode.turns) == 5
    last, *_ = script.asked[4]
    assert TOKENIZER.decode(last).count("<tool_response>") == 4
    assert "No calls are left: answer." in TOKENIZER.decode(last[-40:])
    assert len(episode.rows) == 1
    episode, _ = played(environment, *[again] * 9)
    assert len(episode.turns) == 5
    episode, script = played(environment, again, said("2"))
    assert len(episode.turns) == 2 and "No calls" not in TOKENIZER.decode(script.asked[1][0])


def test_a_tool_that_fails_is_an_error_of_the_episode_and_no_reward():
    @tool
    def broken() -> str:
        raise ConnectionError("away")

    class Broken(ToolEnvironment):
        tools = (broken,)

    with pytest.raises(EpisodeFailed, match="broken") as caught:
        played(Broken(), *[call("broken", "{}")] * 9)
    assert caught.value.failure is FailureClass.TOOL


def test_tools_are_opened_once_for_all_episodes_that_begin_together():
    opened = []

    class Slow(ToolEnvironment):
        async def open(self):
            opened.append(self)
            await asyncio.sleep(0.01)
            return Toolbox(())

    played(Slow(), *[said("5")] * 3, num_samples=3)
    assert len(opened) == 1
