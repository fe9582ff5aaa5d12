"""Agents of openai-agents and smolagents as they are, where a Python with these is named."""

import asyncio
import json
import os
from pathlib import Path

import pytest
from gateways import RENDERER, TOKENIZER, said
from players import Scripted, make_request, play

from async_grpo.bridges import agent
from async_grpo.types import Question, SamplingContract, Verdict

PYTHON = os.environ.get("ASYNC_GRPO_AGENTS_PYTHON", "")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        not PYTHON, reason="ASYNC_GRPO_AGENTS_PYTHON must name the Python where the agents are"
    ),
]
HERE = Path(__file__).parent / "agents"
OPENAI = [
    ["responses"],
    ["responses", "stream"],
    ["chat_completions"],
    ["chat_completions", "stream"],
]
ADDED, TOTAL = '{"a": 2, "b": 3}', said('{"total": 5}')


class Graded(agent.AgentEnvironment):
    """Its episodes are graded by nobody."""

    async def grade(self, question, episodes, services):
        return [Verdict("scored", 1.0, None, "", "", 0.0) for _ in episodes]


@pytest.fixture
def played(tmp_path):
    """The episode of one agent, whose policy says these turns; and what it was asked."""
    TOKENIZER.save_pretrained(tmp_path)

    def played(script, *turns, **fields):
        given = {"num_samples": 1, "question": Question([5], "2+3?", "5", {})}
        given |= {
            "max_row_tokens": 20_000,
            "model": str(tmp_path),
            "sampling": SamplingContract(1.0, (), 200),
        }
        ask = Scripted(*turns)
        environment = Graded([PYTHON, str(HERE / script[0]), *script[1:]])
        group = asyncio.run(play(environment, ask, make_request(**given | fields), RENDERER))
        return group.episodes[0], [sampling.grammar for _, sampling, _ in ask.asked]

    return played


def called(name, arguments):
    call = f'{{"name": "{name}", "arguments": {arguments}}}'
    return said(f"<tool_call>\n{call}\n</tool_call>")


@pytest.mark.parametrize("options", OPENAI, ids=" ".join)
def test_an_agent_of_openai_s_sdk_trains_what_its_policy_said(played, options):
    call = called("add", ADDED)
    episode, grammars = played(["openai_sdk.py", *options], call, TOTAL)
    (row,) = episode.rows
    assert row.token_ids[row.loss_mask].tolist() == [*call, *TOTAL]
    assert grammars == ["", ""]


@pytest.mark.parametrize("options", OPENAI[::3], ids=" ".join)
def test_its_final_answer_comes_under_a_grammar_only_with_constrained_outputs(played, options):
    call = called("add", ADDED)
    episode, (first, second) = played(["openai_sdk.py", *options], call, TOTAL, constrains=True)
    (row,) = episode.rows
    assert row.token_ids[row.loss_mask].tolist() == call
    assert not first
    _, of_content = json.loads(json.loads(second)["structural_tag"])["format"]["elements"]
    assert of_content["json_schema"]["required"] == ["total"]


@pytest.mark.parametrize("turns", [[said("five")], [called("add", ADDED), said("five")]])
def test_a_policy_that_calls_no_tool_or_answers_no_json_is_graded(played, turns):
    episode, _ = played(["openai_sdk.py", "responses"], *turns)
    assert [turn.token_ids.tolist() for turn in episode.turns] == turns


@pytest.mark.parametrize("options", [[], ["stream"]], ids=["whole", "stream"])
def test_an_agent_of_smolagents_trains_what_its_policy_said_and_reads_its_mistakes(played, options):
    turns = [called("add", ADDED), said("five"), called("final_answer", '{"answer": 5}')]
    episode, grammars = played(["smol.py", *options], *turns)
    first, *rest = [row.token_ids[row.loss_mask].tolist() for row in episode.rows]
    assert first == turns[0]  # whose call it then writes as text of its own: another row
    assert rest == [turns[1] + turns[2]]
    assert grammars == ["", "", ""]
