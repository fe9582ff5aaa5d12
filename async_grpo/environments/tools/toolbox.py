"""The tools of one environment: every call is answered, within bounds of time and length."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from async_grpo.environments.base import EpisodeFailed, FailureClass, ModelError
from async_grpo.environments.causes import TRIES, cause_of, reach
from async_grpo.environments.chat.messages import ToolCall, ToolSpec
from async_grpo.environments.tools.base import Tool, ToolMistake, ToolResult
from async_grpo.util.deadlines import TOOL_S
from async_grpo.util.errors import ConfigError

MAX_CHARACTERS = 8_000  # of one result
MAX_CALLS = 16  # of one turn
LET_GO_S = 0.5  # that a cancelled call has to close its connection


class Toolbox:
    """Calls tools by name; one object serves all episodes."""

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        timeout_s: float = TOOL_S,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        self.tools = tuple(tools)
        self._by_name = {str(tool.spec["function"]["name"]): tool for tool in tools}
        if len(self._by_name) < len(self.tools):
            names = ", ".join(sorted(str(tool.spec["function"]["name"]) for tool in tools))
            raise ConfigError(f"the names of tools must differ, got {names}: rename one of them")
        self._timeout_s = timeout_s
        self._answered = Counter[str]()  # number of answered calls by tool
        self._max_characters = max_characters

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The descriptions of the tools, which the model reads."""
        return tuple(tool.spec for tool in self.tools)

    async def answer(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Call the tools of a turn's calls one after the other, and return the results.

        Raises `EpisodeFailed` for a tool that failed, unless the model made a mistake.
        """
        answered = [await self._answer(call) for call in calls[:MAX_CALLS]]
        too_many = f"at most {MAX_CALLS} calls at a time, {len(calls)} were written"
        rest = [ToolResult(call.id, call.name, too_many, True) for call in calls[MAX_CALLS:]]
        return answered + rest

    async def _answer(self, call: ToolCall) -> ToolResult:
        try:
            return ToolResult(call.id, call.name, self._cut(await self._called(call)))
        except ModelError as mistake:
            return ToolResult(call.id, call.name, self._cut(str(mistake)), is_mistake=True)

    async def _called(self, call: ToolCall) -> str:
        if call.problem:
            raise ToolMistake(call.problem)
        if call.name not in self._by_name:
            raise ToolMistake(f"there is no tool {call.name!r}: call {', '.join(self._by_name)}")
        tool, before = self._by_name[call.name], self._answered[call.name]

        def check(error: Exception) -> None:
            """Raise if the tool answered other calls meanwhile: then the arguments are at fault."""
            if self._answered[call.name] - before >= TRIES:
                raise ToolMistake(f"{call.name} failed: {error!r}") from error

        try:
            text = await reach(
                lambda: self._asked(tool, call.arguments),
                is_idempotent=getattr(tool, "is_idempotent", False),
                who=f"tool {call.name}: ",
                check=check,
            )
            self._answered[call.name] += 1
            return text
        except (ModelError, EpisodeFailed):  # a tool may ask a judge, which classifies its failures
            raise
        except Exception as error:  # tools are the user's code and may raise anything
            failed = f"tool {call.name} failed: {error!r}"[:MAX_CHARACTERS]
            raise EpisodeFailed(FailureClass.TOOL, failed, cause=cause_of(error)) from error

    async def _asked(self, tool: Tool, arguments: Mapping[str, object]) -> str:
        task = asyncio.ensure_future(tool.call(arguments))
        try:
            # `wait_for` would wait for a tool that ignores its cancellation.
            if not (await asyncio.wait({task}, timeout=self._timeout_s))[0]:
                task.cancel()
                await asyncio.wait({task}, timeout=LET_GO_S)
                raise TimeoutError(f"no answer within {self._timeout_s:g} s")
            text = task.result()
            if not isinstance(text, str):
                raise TypeError(f"an answer must be text, got {type(text).__name__}")
            return text
        finally:
            task.cancel()

    def _cut(self, text: str) -> str:
        more = len(text) - self._max_characters
        return text if more <= 0 else f"{text[: self._max_characters]}\n[{more} more characters]"
