"""What is said to a model and by it, and who writes it as token ids.

A message is one of OpenAI's chat protocol, a mapping with `role`, `content`, `tool_calls`; a tool
is described as there, `{"type": "function", "function": {"name", "description", "parameters"}}`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from async_grpo.util.errors import AsyncGrpoError

MAX_DEPTH = 64  # of a call's arguments: templates and JSON write what is nested by recursion
Message = Mapping[str, Any]
ToolSpec = Mapping[str, Any]


class MessagesError(AsyncGrpoError, ValueError):
    """Messages, or descriptions of tools, that this model's chat format cannot hold."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One attempt of the model at calling a tool."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""  # why it cannot be called, in words for the model; empty: it can
    text: str = ""  # what the model wrote, of one that cannot
    id: str = field(default_factory=lambda: f"call-{uuid.uuid4().hex[:16]}")


def wrong_arguments(arguments: Any) -> str:
    """What is wrong with the arguments of a call, in words for the model; empty: nothing.

    >>> wrong_arguments({"x": [1]}), wrong_arguments([1])
    ('', 'the arguments of a call must be a JSON object')
    """
    if not isinstance(arguments, Mapping):
        return "the arguments of a call must be a JSON object"
    if _is_deeper(arguments, MAX_DEPTH):
        return f"the arguments of a call must not be nested more than {MAX_DEPTH} deep"
    return ""


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, Mapping | list):
        return False
    inner = value.values() if isinstance(value, Mapping) else value
    return not levels or any(_is_deeper(each, levels - 1) for each in inner)


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the model, read."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""

    def message(self) -> dict[str, Any]:
        """The assistant's message; calls that cannot be called stand in its content, as written.

        >>> Reply("4").message()
        {'role': 'assistant', 'content': '4'}
        """
        broken = [call.text for call in self.tool_calls if call.problem]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "\n".join(text for text in (self.content, *broken) if text),
        }
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in self.tool_calls
            if not call.problem
        ]
        return message | ({"tool_calls": calls} if calls else {})


class Renderer(Protocol):
    """Writes messages as one family of models has learnt to read them; for one thread at a time."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn of the model."""

    @property
    def is_plain(self) -> bool:
        """Whether a turn without tools is its text, from the first id on: no thoughts, no marks."""

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()) -> list[int]:
        """The ids of a whole conversation, up to where the model's next words begin.

        Raises `MessagesError`.
        """

    def parse(
        self,
        sampled_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> Reply:
        """What the model said; without `tools` there are no calls in it."""

    def extend(
        self,
        prompt_ids: Sequence[int],
        *,
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """The next prompt: both id sequences as they are, then `messages`, ready for a turn.

        None where the chat format rewrites what came before, so that only `render` is right.
        Raises `MessagesError`.
        """
