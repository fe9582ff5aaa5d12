"""Servers that speak as OpenEnv's do; OpenEnv itself where its Python is named."""

import asyncio
import json
import math
import os
import subprocess
import time
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest
from gateways import RENDERER, TOKENIZER, said
from players import Scripted, make_request, play
from websockets.asyncio.server import serve

from async_grpo.bridges import openenv
from async_grpo.bridges.openenv import OpenEnvEnvironment
from async_grpo.cluster.head import refusal
from async_grpo.environments.base import EpisodeFailed, FailureClass
from async_grpo.environments.causes import Cause
from async_grpo.environments.find import make_environment, users_environment
from async_grpo.types import Question
from async_grpo.util.ports import free_port

OPENENV = os.environ.get("ASYNC_GRPO_OPENENV_PYTHON", "")
needs_openenv = pytest.mark.skipif(
    not OPENENV, reason="ASYNC_GRPO_OPENENV_PYTHON must name the Python where OpenEnv is"
)

TEXT = {"title": "Guess", "required": ["text"], "properties": {"text": {"type": "string"}}}
FIELDS = {
    "title": "Move",
    "required": ["x", "y"],
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}, "metadata": {}},
}
CALLS = {"title": "CallToolAction", "required": ["tool_name"], "properties": {"tool_name": {}}}
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}


@asynccontextmanager
async def server(schema, *answers, asked=None, sessions=99):
    """The address of one whose sessions give these answers to what follows the reset."""
    num_open = 0

    def schema_of(connection, request):
        if request.path == "/schema":
            return connection.respond(HTTPStatus.OK, json.dumps({"action": schema}))
        return None

    async def handle(socket):
        nonlocal num_open
        if num_open >= sessions:
            full = {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}
            await socket.send(json.dumps(full))
            return
        num_open += 1
        left = [observed({"text": "Guess a number."}, reward=None), *answers]
        try:
            async for message in socket:
                (asked if asked is not None else []).append(json.loads(message))
                if left[0] is None:
                    return
                await socket.send(json.dumps(left.pop(0)))
        finally:
            num_open -= 1

    async with serve(handle, "127.0.0.1", 0, process_request=schema_of) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def observed(observation, *, reward=0.0, done=False):
    data = {"observation": observation, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def failed(code):
    return {"type": "error", "data": {"code": code, "message": "not so", "errors": []}}


def played(schema, turns, *answers, sessions=99, **fields):
    """The group, what the engine was asked, and what the server was."""
    asked, ask = [], Scripted(*turns)
    question = Question([5], "A game.", None, {"reset": {"seed": 7}})
    given = {"question": question, "num_samples": 1, "max_row_tokens": 4000} | fields

    async def run():
        async with server(schema, *answers, asked=asked, sessions=sessions) as url:
            environment = make_environment(users_environment(f"openenv:{url}"))
            return await play(environment, ask, make_request(**given), RENDERER)

    return asyncio.run(run()), ask.asked, asked


def call(name, **arguments):
    return said(f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>")


def test_what_the_model_says_is_the_action_and_the_rewards_are_summed():
    turns = [said("4"), said("5")]
    group, history, asked = played(
        TEXT,
        turns,
        observed({"text": "Higher."}, reward=0.25),
        observed({"text": "Yes."}, reward=1, done=True),
    )
    (row,) = group.episodes[0].rows
    assert row.token_ids[row.loss_mask].tolist() == [*turns[0], *turns[1]]
    assert "A game.\n\nGuess a number." in TOKENIZER.decode(history[0][0])
    assert "Higher." in TOKENIZER.decode(history[1][0])
    assert asked == [
        {"type": "reset", "data": {"seed": 7}},
        {"type": "step", "data": {"text": "4"}},
        {"type": "step", "data": {"text": "5"}},
    ]
    assert (group.verdicts[0].status, group.verdicts[0].reward) == ("scored", 1.25)


def test_an_action_of_several_fields_is_a_tool_and_one_that_is_none_is_told():
    turns = [call("act", x=1), call("act", x=1, y=2)]
    group, history, asked = played(
        FIELDS, turns, failed("VALIDATION_ERROR"), observed({"x": 1}, reward=1.0, done=True)
    )
    assert "metadata" not in TOKENIZER.decode(history[0][0])
    assert "not so" in TOKENIZER.decode(history[1][0])
    assert asked[-1] == {"type": "step", "data": {"x": 1, "y": 2}}
    assert group.verdicts[0].reward == 1.0


OTHER = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}


@pytest.mark.parametrize(
    ("fields", "arguments", "told"),
    [
        (
            {"way": {"type": "string", "enum": ["left", "up"]}, "steps": {"type": "integer"}},
            {"way": "up", "steps": 2},
            ["left", "steps"],
        ),
        (
            {"message": {"type": "string"}, "to": OTHER},
            {"message": "hello", "to": "Ann"},
            ["message", "to"],
        ),
        (
            {"tool": {"type": "string"}, "args": {"type": "object", "default": {}}},
            {"tool": "add", "args": {"a": 2}},
            ["args"],
        ),
        ({"way": {"type": "string", "enum": ["left", "up"]}}, {"way": "left"}, ["left", "up"]),
        ({"go": {"type": "string", "const": "on"}}, {"go": "on"}, ["go", "const"]),
    ],
)
def test_an_action_with_optional_fields_or_set_words_is_a_call_that_the_model_is_told(
    fields, arguments, told
):
    properties = {"metadata": {"type": "object"}, **fields}
    schema = {"title": "Step", "required": list(fields)[:1], "properties": properties}
    group, history, asked = played(
        schema, [call("act", **arguments)], observed({"text": "Yes."}, reward=1, done=True)
    )
    read = TOKENIZER.decode(history[0][0])
    assert all(f'"{word}"' in read for word in told)
    assert "metadata" not in read
    assert asked[-1] == {"type": "step", "data": arguments}
    assert group.verdicts[0].reward == 1


def test_a_text_that_has_a_default_is_still_what_the_model_says():
    schema = {"title": "Say", "properties": {"text": {"type": "string", "default": ""}}}
    _, _, asked = played(schema, [said("4")], observed({"text": "Yes."}, done=True))
    assert asked[-1] == {"type": "step", "data": {"text": "4"}}


def test_tools_of_a_server_are_listed_and_called_until_the_model_calls_none():
    result = {"tool_name": "add", "result": {"content": [{"type": "text", "text": "five"}]}}
    group, history, asked = played(
        CALLS,
        [call("add", a=2, b=3), said("It is five.")],
        observed({"tools": [ADD]}),
        observed(result, reward=0.5),
    )
    assert asked[2]["data"] == {
        "type": "call_tool", "tool_name": "add", "arguments": {"a": 2, "b": 3},
    }  # fmt: skip
    assert "five" in TOKENIZER.decode(history[1][0])
    assert (group.verdicts[0].reward, len(group.episodes[0].turns)) == (0.5, 2)


def test_a_model_that_never_acts_has_no_answer():
    group, _, _ = played(CALLS, [said("No.")], observed({"tools": [ADD]}))
    assert (group.verdicts[0].status, group.verdicts[0].reason) == ("unscorable", "no action")


def test_an_episode_without_room_keeps_the_rewards_until_there():
    turns = [said("4")] * 9
    answers = [observed({"text": "Higher."}, reward=0.25)] * 9
    group, _, _ = played(TEXT, turns, *answers, max_row_tokens=140)
    (episode,) = group.episodes
    assert (episode.is_cut, group.verdicts[0].reward) == (True, 0.25 * len(episode.turns))


def test_members_wait_for_the_sessions_of_a_server(monkeypatch):
    monkeypatch.setattr(openenv, "CAPACITY_INTERVAL_S", 0.01)
    done = observed({"text": "Yes."}, reward=1.0, done=True)
    group, _, _ = played(TEXT, [said("4")] * 3, done, sessions=1, num_samples=3)
    assert [verdict.reward for verdict in group.verdicts] == [1.0] * 3


@pytest.mark.parametrize(
    ("answer", "sentence", "cause"),
    [
        (None, "failed at step: ConnectionClosed", Cause.SERVER),
        (failed("EXECUTION_ERROR"), "failed at step: not so", Cause.UNKNOWN),
        ({"type": "observation"}, "failed at step: KeyError", Cause.UNKNOWN),
        (observed({"text": "Yes."}, reward=math.nan), "must give finite rewards", Cause.UNKNOWN),
    ],
)
def test_a_server_that_fails_is_an_error_and_no_reward(answer, sentence, cause):
    with pytest.raises(EpisodeFailed, match=sentence) as caught:
        played(TEXT, [said("4")] * 3, answer, observed({"text": "Yes."}, done=True))
    assert caught.value.failure == FailureClass.ENVIRONMENT
    assert caught.value.cause is cause and not caught.value.again


def test_an_episode_whose_actions_the_server_rewards_with_nothing_is_graded_as_it_stands():
    """Else the try would be kept in which the model does not act."""
    answers = [observed({"tools": [ADD]}), observed({"tool_name": "add", "result": 5}, reward=None)]
    turns = [call("add", a=2, b=3), said("It is five.")]
    group, asked, _ = played(CALLS, turns, *answers)
    assert len(asked) == len(group.episodes[0].turns) == 2
    (verdict,) = group.verdicts
    assert (verdict.status, verdict.reward) == ("scored", 0.0)
    assert verdict.reason == "no action was rewarded"


def test_a_server_that_is_not_there_is_named():
    environment = OpenEnvEnvironment(["http://127.0.0.1:9"])
    with pytest.raises(EpisodeFailed, match="has no schema of its actions") as caught:
        asyncio.run(play(environment, Scripted(), make_request(), RENDERER))
    assert caught.value.failure is FailureClass.DEADLINE  # it has been waited for


@contextmanager
def real_server(name):
    """The address of a server of tests/bridges/tasksets/, run by OpenEnv itself."""
    port = free_port()
    command = [OPENENV, "-m", "uvicorn", f"{name}:app", "--port", str(port), "--log-level", "error"]
    process = subprocess.Popen(command, cwd=Path(__file__).parent / "tasksets")
    try:
        until = time.monotonic() + 120
        while refusal("127.0.0.1", port):
            assert process.poll() is None and time.monotonic() < until, "it does not listen"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def really_played(url, *turns, num_samples=1):
    """The group of a real server's episodes, and what the model read last."""
    question = Question([5], "A game.", None, {"reset": {"seed": 7}})
    request = make_request(question=question, num_samples=num_samples, max_row_tokens=4000)
    ask = Scripted(*turns)
    group = asyncio.run(play(OpenEnvEnvironment([url]), ask, request, RENDERER))
    return group, TOKENIZER.decode(ask.asked[-1][0])


@needs_openenv
def test_a_server_of_openenv_itself_plays_a_group():
    with real_server("oe_higher") as url:  # one session after the other
        group, read = really_played(url, *[said("0"), said("9")] * 2, num_samples=2)
    assert [verdict.reward for verdict in group.verdicts] == [0.5, 0.5]
    assert "Higher." in read


@needs_openenv
def test_optional_fields_of_openenv_s_actions_are_told_and_set():
    with real_server("oe_walk") as url:
        turns = [
            call("act", direction="right", steps=2),
            call("act", direction="sideways"),
            call("act", direction="right"),
        ]
        group, read = really_played(url, *turns)
    assert '"steps"' in read and "You stand on 2." in read and "sideways" in read
    assert [verdict.reward for verdict in group.verdicts] == [1.0]


@needs_openenv
def test_a_server_of_tools_that_rewards_nothing_is_no_failure():
    with real_server("oe_echo") as url:
        group, read = really_played(url, call("echo_message", message="hello"), said("Bye."))
    (verdict,) = group.verdicts
    assert "<tool_response>" in read and "hello" in read
    assert (verdict.status, verdict.reward) == ("scored", 0.0)
