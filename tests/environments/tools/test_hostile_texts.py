"""Whatever tools say and models write: nothing escapes, nothing hangs, and the run goes on."""

import asyncio
import os
import time
from pathlib import Path

import numpy as np
import pytest
from families import tokenizer_of
from hostile_texts import CONTROL, PROGRAMS, SAID, WRITTEN
from players import Scripted, make_request, play

from async_grpo.environments.chat.messages import ToolCall
from async_grpo.environments.chat.template import TemplateRenderer
from async_grpo.environments.tools.code import PythonTool
from async_grpo.environments.tools.environment import ToolEnvironment
from async_grpo.environments.tools.function import tool
from async_grpo.environments.tools.toolbox import MAX_CHARACTERS, Toolbox
from async_grpo.types import Question, SamplingContract, Verdict
from benchmarks.cores import family

FAMILIES = ["smollm2", "qwen2_5", "llama3", "phi3"]
LONG_S = 20.0  # on a busy machine: what takes longer hangs
GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
QUESTION = Question(np.array([1], np.int32), "what is there?", None, {})


class Asked(ToolEnvironment):
    """One tool, which says what a test wants."""

    def __init__(self, says="5"):
        super().__init__()
        self.num_calls = 0

        @tool
        def add(a: int) -> str:
            self.num_calls += 1
            return says

        self.tools = (add,)

    async def grade(self, question, episodes, services):
        return [Verdict.scored(1.0)] * len(episodes)


def played(family, environment, *texts):
    """(the episode, what the engine was asked) of these turns of the model."""
    tokenizer, started = tokenizer_of(family), time.monotonic()
    renderer = TemplateRenderer(tokenizer)
    turns = [
        [*tokenizer(text, add_special_tokens=False)["input_ids"], renderer.stop_token_ids[0]]
        for text in texts
    ]
    request = make_request(
        QUESTION,
        num_samples=1,
        max_row_tokens=10**6,
        sampling=SamplingContract(1.0, (), 200_000),
    )
    script = Scripted(*turns)
    group = asyncio.run(play(environment, script, request, renderer=renderer))
    assert time.monotonic() - started < LONG_S
    return group.episodes[0], [history for history, *_ in script.asked]


def num_control(family, ids):
    known = {*tokenizer_of(family).all_special_ids, *tokenizer_of(family).added_tokens_decoder}
    known |= {tokenizer_of(family).convert_tokens_to_ids(token) for token in CONTROL}
    return sum(token in known for token in ids)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SAID)
def test_what_a_tool_says_is_read_and_speaks_for_nobody(name, family):
    said, harmless = Asked(SAID[name]), Asked()
    episode, (_, read) = played(family, said, GOOD, "five")
    _, (_, expected) = played(family, harmless, GOOD, "five")
    assert said.num_calls == harmless.num_calls == 1
    assert num_control(family, read) == num_control(family, expected)
    assert len(read) < len(expected) + 4 * MAX_CHARACTERS + 100  # a character has 4 bytes at most
    (row,) = episode.rows
    sampled = np.concatenate([turn.token_ids for turn in episode.turns])
    assert row.token_ids[row.loss_mask].tolist() == sampled.tolist()


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_model_writes_in_place_of_a_call_is_its_mistake_and_the_episode_goes_on(name):
    environment = Asked()
    episode, asked = played("qwen2_5", environment, WRITTEN[name], "five")
    assert environment.num_calls == 0
    assert (len(episode.turns), len(episode.rows), len(asked)) == (2, 1, 2)
    assert len(asked[1]) < len(asked[0]) + len(episode.turns[0].token_ids) + MAX_CHARACTERS + 200


@pytest.mark.integration
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_held_by_its_jail_and_the_next_one_runs(name, tmp_path):
    before = family(os.getpid())
    canaries = [tmp_path / "canary", Path("/canary"), Path.cwd().parent / "canary"]
    box = Toolbox([PythonTool(max_seconds=2.0)])

    async def answers(*codes):
        calls = [ToolCall("run_python", {"code": code}) for code in codes]
        return [result.text for result in await box.answer(calls)]

    started = time.monotonic()
    code = PROGRAMS[name].replace("{canary!r}", repr(str(canaries[0])))
    text, innocent = asyncio.run(answers(code, "print(2 + 3)"))
    assert time.monotonic() - started < LONG_S
    assert innocent == "5\n"
    if name == "forks":  # the kernel refuses the next
        assert "BlockingIOError" in text and "failed" in text
    assert len(text) < MAX_CHARACTERS + 100
    assert not any(canary.exists() for canary in canaries)
    assert family(os.getpid()) <= before
