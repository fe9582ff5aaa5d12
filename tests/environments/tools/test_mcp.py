"""Servers of tools, good ones and bad ones, by pipes and by HTTP."""

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from async_grpo.environments import causes
from async_grpo.environments.base import EpisodeFailed, FailureClass
from async_grpo.environments.causes import Cause
from async_grpo.environments.chat.messages import ToolCall
from async_grpo.environments.tools import mcp as tools_mcp
from async_grpo.environments.tools.mcp import McpServer
from async_grpo.environments.tools.toolbox import Toolbox
from async_grpo.util.errors import ServerAway

pytestmark = pytest.mark.integration
SERVER = [sys.executable, str(Path(__file__).with_name("tool_server.py"))]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_up(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def served(by):
    if by == "pipes":
        yield SERVER
        return
    port = free_port()
    process = subprocess.Popen([*SERVER, "http", str(port)])
    try:
        while not is_up(port):
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def with_tools(by, scenario):
    """Run it with a toolbox of the server, which may take a while to start."""

    async def run(address):
        server = McpServer(address)
        try:
            tools = await server.tools()
            return await scenario(Toolbox(tools, max_characters=100))
        finally:
            await server.close()

    with served(by) as address:
        return asyncio.run(run(address))


def call(name, **arguments):
    return [ToolCall(name, arguments)]


@pytest.mark.parametrize("by", ["pipes", "http"])
def test_a_servers_tools_are_told_of_called_and_their_mistakes_read(by):
    async def scenario(box):
        names = {spec["function"]["name"]: spec["function"] for spec in box.specs}
        assert names["add"]["parameters"]["required"] == ["a", "b"]
        (good,) = await box.answer(call("add", a=2, b=3))
        assert (good.text, good.is_mistake) == ("5", False)
        (wrong,) = await box.answer(call("add", a="many", b=3))
        assert wrong.is_mistake and "a" in wrong.text
        (refused,) = await box.answer(call("refuse"))
        assert refused.is_mistake and "not like this" in refused.text
        (long,) = await box.answer(call("flood", size=1_000))
        assert long.text.endswith("[900 more characters]")

    with_tools(by, scenario)


@pytest.mark.parametrize("name", ["die", "hang"])
def test_a_server_that_fails_ends_the_episode_and_is_started_again(name):
    async def scenario(box):
        impatient = Toolbox(box.tools, timeout_s=3.0)
        with pytest.raises(EpisodeFailed) as caught:
            await impatient.answer(call(name))
        assert caught.value.failure is FailureClass.TOOL
        (good,) = await box.answer(call("add", a=2, b=3))
        return good.text

    assert with_tools("pipes", scenario) == "5"


@pytest.mark.parametrize("by", ["pipes", "http"])
def test_an_answer_without_end_is_not_taken_in(by, monkeypatch):
    monkeypatch.setattr(tools_mcp, "MAX_BYTES", 100_000)

    async def scenario(box):
        with pytest.raises(EpisodeFailed):
            await box.answer(call("flood", size=1_000_000))
        (good,) = await box.answer(call("add", a=2, b=3))
        return good.text

    assert with_tools(by, scenario) == "5"


@pytest.mark.parametrize(
    ("server", "named", "kind"),
    [
        (["no-such-server"], "no-such-server", FileNotFoundError),
        ([sys.executable, "-c", "print('no message'); input()"], "no message", ServerAway),
        (
            [sys.executable, "-c", "while True: print('x' * 10**6, end='')"],
            "while True",
            ServerAway,
        ),
        ("http://127.0.0.1:9/mcp", "127.0.0.1:9", ServerAway),
    ],
)
def test_a_server_that_is_none_is_named(server, named, kind):
    with pytest.raises(kind, match=re.escape(named)):
        asyncio.run(McpServer(server).tools())


def test_a_call_that_finds_its_server_down_is_made_again_when_it_is_up():
    told, is_told, port = [], asyncio.Event(), free_port()

    def start():
        process = subprocess.Popen([*SERVER, "http", str(port)])
        while not is_up(port):
            time.sleep(0.1)
        return process

    async def tell(why):
        told.append(why)
        is_told.set()
        await asyncio.sleep(600)

    async def scenario():
        process = start()
        server = McpServer(f"http://127.0.0.1:{port}/mcp")
        try:
            box = Toolbox(await server.tools())
            causes.TELL.set(tell)
            with pytest.raises(EpisodeFailed) as caught:  # it may have been carried out
                await box.answer(call("die"))
            assert caught.value.cause is Cause.SERVER and not told
            process.wait()
            asking = asyncio.create_task(box.answer(call("add", a=2, b=3)))
            await is_told.wait()
            process = await asyncio.to_thread(start)
            (good,) = await asking
            process.kill()
            process.wait()
            again = asyncio.create_task(box.answer(call("add", a=3, b=3)))
            is_told.clear()  # on a connection that was a good one
            await is_told.wait()
            process = await asyncio.to_thread(start)
            (other,) = await again
            return good.text, other.text
        finally:
            process.kill()
            process.wait()
            await server.close()

    assert asyncio.run(scenario()) == ("5", "6")
