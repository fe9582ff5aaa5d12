"""Every call is answered: mistakes are read by the model, failures end the episode."""

import asyncio
import threading
import time

import pytest

from async_grpo.chat.base import ToolCall
from async_grpo.environments.base import EpisodeFailed, FailureClass
from async_grpo.errors import ConfigError
from async_grpo.tools.base import ToolMistake
from async_grpo.tools.function import tool
from async_grpo.tools.toolbox import MAX_CALLS, Toolbox

RELEASED = threading.Event()


@tool
def flood(size: int) -> str:
    return "x" * size


@tool
def hang() -> str:
    RELEASED.wait()
    return "late"


@tool
async def ignore_the_end() -> str:
    for _ in range(100):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue
    return "late"


@tool
def refuse() -> str:
    raise ToolMistake("not like this")


@tool
def crash() -> str:
    raise ConnectionError("the database is away")


@tool
async def ask_a_judge() -> str:
    raise EpisodeFailed(FailureClass.JUDGE, "the judge is away")


class Liar:
    def __init__(self):
        self.spec = {"type": "function", "function": {"name": "lie"}}

    async def call(self, arguments):
        return {"not": "text"}


BOX = Toolbox(
    [flood, hang, ignore_the_end, refuse, crash, ask_a_judge, Liar()],
    timeout_s=0.2,
    max_characters=100,
)


@pytest.fixture(autouse=True, scope="module")
def released():
    yield
    RELEASED.set()


def answer(*calls):
    return asyncio.run(BOX.answer(calls))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (ToolCall("refuse", {}), "not like this"),
        (ToolCall("nobody", {}), "there is no tool 'nobody': call flood"),
        (ToolCall("flood", {"size": "many"}), "arguments are wrong"),
        (ToolCall("flood", {}, "this call is no JSON", "{"), "this call is no JSON"),
    ],
)
def test_a_mistake_of_the_models_is_something_that_it_reads(call, said):
    (result,) = answer(call)
    assert result.is_mistake
    assert said in result.message()["content"]
    assert result.message()["tool_call_id"] == call.id


@pytest.mark.parametrize("name", ["hang", "ignore_the_end", "crash", "lie"])
def test_a_tool_that_hangs_fails_or_lies_ends_the_episode_in_time(name):
    started = time.monotonic()

    async def scenario():
        with pytest.raises(EpisodeFailed, match=f"tool {name} failed") as caught:
            await BOX.answer([ToolCall(name, {})])
        assert time.monotonic() - started < 2
        return caught.value.failure

    assert asyncio.run(scenario()) is FailureClass.TOOL


def test_what_else_has_failed_within_a_tool_keeps_its_class():
    with pytest.raises(EpisodeFailed, match="judge is away") as caught:
        answer(ToolCall("ask_a_judge", {}))
    assert caught.value.failure is FailureClass.JUDGE


def test_what_floods_is_cut_and_says_so():
    (result,) = answer(ToolCall("flood", {"size": 1_000}))
    assert result.text == "x" * 100 + "\n[900 more characters]"


def test_no_turn_calls_without_end():
    results = answer(*[ToolCall("flood", {"size": 1})] * (MAX_CALLS + 3))
    assert [result.is_mistake for result in results] == [False] * MAX_CALLS + [True] * 3


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="names of tools must differ, got crash, crash, flood"):
        Toolbox([crash, flood, crash])
