"""The environment of an OpenEnv server, which is asked over its WebSocket.

    --environment openenv:http://127.0.0.1:8000

consumes:     questions, whose column `reset` holds what the server's reset takes (a seed)
produces:     episodes of one WebSocket session each, with the sum of the server's rewards
waits for:    the server's answers, and a free session
unblocked by: these, their deadline, or the end of the connection

If an action's only field is a free text, it is what the model writes. Any other action, even if its
further fields are optional, is a tool call: of a tool that the server lists, if its actions are
calls, else of one tool whose parameters are the fields of an action.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from async_grpo.environments.base import Environment, EpisodeFailed, FailureClass, Policy, Services
from async_grpo.environments.causes import cause_of
from async_grpo.environments.chat.messages import Message, Reply, ToolSpec, tool_spec
from async_grpo.environments.episode import NoRoom
from async_grpo.environments.tools.base import ToolMistake
from async_grpo.environments.tools.toolbox import Toolbox
from async_grpo.types import Episode, Question, Verdict
from async_grpo.util.deadlines import OPENENV_ANSWER_S
from async_grpo.util.ports import is_here

Json = Mapping[str, Any]  # from the server
MAX_BYTES = 16 << 20  # of one answer
CAPACITY_INTERVAL_S = 1.0  # between tries at a server whose sessions are all taken
CALLS = ("Action", "CallToolAction", "ListToolsAction")  # actions of servers that list tools
NOT_SHOWN = ("done", "reward", "metadata")  # fields of an observation that the model does not read
NOT_SAID = ("metadata",)  # fields of an action that the model does not set


class OpenEnvEnvironment(Environment):
    """One worker's episodes on one server."""

    url = ""
    max_turns = 64

    def __init__(self, words: Sequence[str] = ()) -> None:
        """`words`: the URL, as the option gives it."""
        self.url = " ".join(words) or self.url

    def first(self, question: Question, seen: str) -> str:
        """The first message: the question, and the observation of the reset."""
        return "\n\n".join(filter(None, [question.input, seen]))

    async def play(self, question: Question, policy: Policy, services: Services) -> Episode:
        """Send each turn of the model as an action, until the server says that it is done."""
        is_cut = False
        async with opened(self.url, question.columns.get("reset") or {}) as session:
            toolbox = Toolbox(await session.tools())
            dialogue = await services.dialogue(tools=toolbox.specs)
            seen = self.first(question, session.seen)
            messages: list[Message] = [{"role": "user", "content": seen}]
            try:
                for _ in range(self.max_turns):
                    reply = await dialogue.reply(policy, messages)
                    answers = await _acted(session, toolbox, reply)
                    if session.is_done or not answers:
                        break
                    messages += [reply.message(), *answers]
            except NoRoom:
                is_cut = True
            return replace(policy.episode(is_cut=is_cut), verdict=session.verdict())


class OpenEnvSession:
    """One connection, which is one environment of the server."""

    def __init__(self, url: str, socket: Any, schema: Json) -> None:
        self.seen = ""  # the last observation, as the model reads it
        self.is_done = False
        self._url = url
        self._socket = socket
        self._schema = schema
        self._rewards: list[float | None] = []

    @property
    def text_field(self) -> str:
        """The only field of an action, if it is a free text; empty: the model acts by a tool."""
        name, *more = self._fields or ("",)
        field = self._fields.get(name, {})
        # The model has to be shown the values of a text that must be one of a few.
        is_free = field.get("type") == "string" and not {"enum", "const"} & field.keys()
        return name if is_free and not more and not self._has_calls else ""

    @property
    def _fields(self) -> Json:
        """The fields of an action that the model may set, by name."""
        properties = self._schema.get("properties", {})
        return {name: field for name, field in properties.items() if name not in NOT_SAID}

    @property
    def _has_calls(self) -> bool:
        return self._schema.get("title") in CALLS

    async def reset(self, given: Mapping[str, object]) -> None:
        """Begin an episode."""
        self._read(await self.ask("reset", given))

    async def step(self, action: Mapping[str, object]) -> str:
        """Take one action and return its observation; raises `ToolMistake` for a refused one."""
        if self.is_done:
            raise ToolMistake("the episode has ended")
        answer = await self.ask("step", action)
        self._rewards.append(answer.get("reward"))
        self._read(answer)
        return self.seen

    async def tools(self) -> list[ServerTool]:
        """The tools by which the model acts; none if its actions are free texts."""
        if self.text_field:
            return []
        if not self._has_calls:
            schema = {**self._schema, "properties": self._fields}
            return [ServerTool(self, tool_spec("act", "One action.", schema))]
        listed = await self.ask("step", {"type": "list_tools"})
        specs = [
            tool_spec(tool["name"], tool["description"], tool["input_schema"])
            for tool in listed["observation"]["tools"]
        ]
        return [ServerTool(self, spec, is_call=True) for spec in specs]

    def verdict(self) -> Verdict:
        """The sum of the rewards; without any action the episode is unscorable."""
        rewards = [float(reward) for reward in self._rewards if reward is not None]
        if not self._rewards:
            return Verdict("unscorable", 0.0, None, "openenv", "no action", 0.0)
        if not math.isfinite(sum(rewards)):
            raise self._failed(f"must give finite rewards, it gave {self._rewards}")
        why = "" if rewards else "no action was rewarded"
        return Verdict("scored", sum(rewards), None, "openenv", why, 0.0)

    async def ask(self, kind: str, data: Mapping[str, object]) -> Json:
        """Send one message and return the data of its answer.

        Raises `ToolMistake` for an invalid action, `EpisodeFailed` for any other error.
        """
        from websockets.exceptions import ConnectionClosed

        with _failure(self._url, f"failed at {kind}"):
            async with asyncio.timeout(OPENENV_ANSWER_S):
                with suppress(ConnectionClosed):  # a full server closes, but its answer is here
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                answer = json.loads(await self._socket.recv())
            found: Json = answer["data"]
        if answer.get("type") != "error":
            return found
        if found.get("code") == "CAPACITY_REACHED":
            raise _NoSession
        if found.get("code") == "VALIDATION_ERROR" and kind == "step":
            raise ToolMistake(f"{found.get('message')}: {json.dumps(found.get('errors'))}")
        raise self._failed(f"failed at {kind}: {found.get('message')}")

    def _read(self, answer: Json) -> None:
        self.is_done = bool(answer.get("done"))
        self.seen = shown(answer.get("observation") or {})

    def _failed(self, what: str) -> EpisodeFailed:
        return EpisodeFailed(FailureClass.ENVIRONMENT, f"OpenEnv server {self._url} {what}")


@dataclass(frozen=True, slots=True, eq=False)
class ServerTool:
    """See `Tool`: an action of one episode."""

    session: OpenEnvSession
    spec: ToolSpec
    is_call: bool = False  # an action of the server is a call of one of the tools that it lists

    async def call(self, arguments: Mapping[str, object]) -> str:
        """See `Tool`."""
        name = self.spec["function"]["name"]
        call = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        return await self.session.step(call if self.is_call else arguments)


class _NoSession(Exception):
    """All sessions of the server are taken."""


@contextmanager
def _failure(url: str, what: str) -> Iterator[None]:
    """Raise an error of the server, or of the connection to it, as `EpisodeFailed`."""
    import httpx2
    from websockets.exceptions import WebSocketException

    try:
        yield
    except (OSError, ValueError, KeyError, WebSocketException, httpx2.HTTPError) as error:
        what = f"OpenEnv server {url} {what}: {error!r}"
        raise EpisodeFailed(FailureClass.ENVIRONMENT, what, cause=cause_of(error)) from error


@asynccontextmanager
async def opened(url: str, given: Mapping[str, object]) -> AsyncIterator[OpenEnvSession]:
    """Wait for a free session of the server, and reset it with `given`."""
    from websockets.asyncio.client import connect

    schema = await action_schema(url)
    address = f"ws{url.rstrip('/').removeprefix('http')}/ws"
    proxy: Literal[True] | None = None if is_here(url) else True
    while True:
        with _failure(url, "cannot be reached"):
            socket = await connect(
                address, open_timeout=OPENENV_ANSWER_S, max_size=MAX_BYTES, proxy=proxy
            )
        async with socket:
            session = OpenEnvSession(url, socket, schema)
            try:
                await session.reset(given)
            except _NoSession:
                await asyncio.sleep(CAPACITY_INTERVAL_S)
                continue
            yield session
            return


async def action_schema(url: str) -> Json:
    """The JSON schema of the server's actions."""
    import httpx2

    with _failure(url, "has no schema of its actions"):
        async with httpx2.AsyncClient(timeout=OPENENV_ANSWER_S, trust_env=not is_here(url)) as http:
            answer = await http.get(f"{url.rstrip('/')}/schema")
            return cast(Json, answer.raise_for_status().json()["action"])


async def _acted(session: OpenEnvSession, toolbox: Toolbox, reply: Reply) -> list[Message]:
    """The messages that answer a turn; none if it was to call a tool and has not."""
    if not session.text_field:
        return [result.message() for result in await toolbox.answer(reply.tool_calls)]
    try:
        seen = await session.step({session.text_field: reply.content})
    except ToolMistake as mistake:
        seen = str(mistake)
    return [{"role": "user", "content": seen}]


def shown(observation: Mapping[str, object]) -> str:
    """An observation as the model reads it: its only text, or JSON.

    >>> shown({"prompt": "Guess.", "done": False, "reward": None}), shown({"x": 1, "y": 2})
    ('Guess.', '{"x": 1, "y": 2}')
    >>> shown({"tool_name": "add", "result": {"content": [{"type": "text", "text": "3"}]}})
    '3'
    """
    parts = {name: value for name, value in observation.items() if name not in NOT_SHOWN}
    if "tool_name" in parts:
        result = parts.get("error") or parts.get("result")
        content = result.get("content") if isinstance(result, Mapping) else None
        texts = [part["text"] for part in content or [] if part.get("type") == "text"]
        return "\n".join(texts) if texts else json.dumps(result)
    (only,) = parts.values() if len(parts) == 1 else ({},)
    return only if isinstance(only, str) else json.dumps(parts) if parts else ""
