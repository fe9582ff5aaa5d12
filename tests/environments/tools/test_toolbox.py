"""Every call is answered: mistakes are read by the model, failures end the episode."""

import asyncio
import threading
import time

import pytest

from async_grpo.environments import causes
from async_grpo.environments.base import EpisodeFailed, FailureClass, ModelError
from async_grpo.environments.causes import Cause
from async_grpo.environments.chat.messages import ToolCall
from async_grpo.environments.tools.base import ToolMistake
from async_grpo.environments.tools.function import tool
from async_grpo.environments.tools.toolbox import MAX_CALLS, Toolbox
from async_grpo.util.errors import ConfigError

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
def fly() -> str:
    raise ModelError("nobody flies")


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
    [flood, hang, ignore_the_end, refuse, fly, crash, ask_a_judge, Liar()],
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
        (ToolCall("fly", {}), "nobody flies"),
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


class Index:
    """A server that is away for its first `times` requests, or for those that ask for nothing."""

    def __init__(self, error, times):
        self.error, self.times, self.asked = error, times, []

    def look(self, word: str) -> str:
        """What it holds."""
        self.asked.append(word)
        if not word or len(self.asked) <= self.times:
            raise self.error
        return f"found {word}"


def answered_by(index, *words, is_idempotent=False):
    """(the results, what was told of outages) of calls that an episode makes side by side."""
    told = []

    async def tell(why):
        told.append(why)
        await asyncio.sleep(60)

    async def scenario():
        causes.TELL.set(tell)
        box = Toolbox([tool(is_idempotent=is_idempotent)(index.look)])
        calls = [[ToolCall("look", {"word": word})] for word in words]
        return [text for (text,) in await asyncio.gather(*map(box.answer, calls))]

    return asyncio.run(scenario()), told


@pytest.mark.parametrize(
    ("error", "is_idempotent"), [(ConnectionRefusedError(), False), (ConnectionResetError(), True)]
)
def test_a_call_whose_server_is_away_is_made_again_with_the_same_arguments(error, is_idempotent):
    index = Index(error, times=3)
    (result,), told = answered_by(index, "owl", is_idempotent=is_idempotent)
    assert (result.text, result.is_mistake) == ("found owl", False)
    assert index.asked == ["owl"] * 4
    assert told == [f"tool look: {error!r}"]


@pytest.mark.parametrize(
    ("error", "cause"),
    [(ConnectionResetError(), Cause.SERVER), (RuntimeError("no idea"), Cause.UNKNOWN)],
)
def test_a_call_that_may_have_arrived_is_not_made_twice(error, cause):
    index = Index(error, times=1)
    with pytest.raises(EpisodeFailed, match="tool look failed") as caught:
        answered_by(index, "owl")
    assert (index.asked, caught.value.cause) == (["owl"], cause)


def test_a_server_that_answers_all_others_is_not_away_for_the_arguments_of_one():
    results, _ = answered_by(Index(ConnectionRefusedError(), times=0), "", "owl", "fox", "elk")
    assert [result.is_mistake for result in results] == [True, False, False, False]
    assert "ConnectionRefusedError" in results[0].text
