"""What is said to a model and by it, and who writes it as token ids.

A message is one of OpenAI's chat protocol, a mapping with `role`, `content`, `tool_calls`; a tool
is described as there, `{"type": "function", "function": {"name", "description", "parameters"}}`.

Texts of users and tools come from anywhere. One that spells a control token of the model's, such as
the end of a turn, would be read as that token, and could speak for the user or for the model. What
tools say spells no mark of the chat format either, such as the end of a result, which tokenizers do
not call special; in a prompt of the user's `<think>` may be meant. `Cleaner` breaks them.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from async_grpo.util.errors import AsyncGrpoError

MAX_DEPTH = 64  # of a call's arguments: templates and JSON write what is nested by recursion
ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
Message = Mapping[str, Any]
ToolSpec = Mapping[str, Any]
Shaped = dict[str, Any]  # a message or a tool as templates take it
Tokenizer = Any  # Hugging Face's, or whatever has the members of theirs that are used here


class MessagesError(AsyncGrpoError, ValueError):
    """Messages, or descriptions of tools, that this model's chat format cannot hold."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One attempt of the model at calling a tool."""

    name: str
    arguments: Mapping[str, object]
    problem: str = ""  # why it cannot be called, in words for the model; empty: it can
    text: str = ""  # what the model wrote, of one that cannot
    id: str = field(default_factory=lambda: f"call-{uuid.uuid4().hex[:16]}")


def wrong_arguments(arguments: object) -> str:
    """What is wrong with the arguments of a call, in words for the model; empty: nothing.

    >>> wrong_arguments({"x": [1]}), wrong_arguments([1])
    ('', 'the arguments of a call must be a JSON object')
    """
    if not isinstance(arguments, Mapping):
        return "the arguments of a call must be a JSON object"
    if _is_deeper(arguments, MAX_DEPTH):
        return f"the arguments of a call must not be nested more than {MAX_DEPTH} deep"
    return ""


def _is_deeper(value: object, levels: int) -> bool:
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

    def message(self) -> Shaped:
        """The assistant's message; calls that cannot be called stand in its content, as written.

        >>> Reply("4").message()
        {'role': 'assistant', 'content': '4'}
        """
        broken = [call.text for call in self.tool_calls if call.problem]
        message: Shaped = {
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


class Cleaner:
    """Cleans for a tokenizer: Hugging Face's, or anything with the members of theirs used here."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added, template = tokenizer.added_tokens_decoder.values(), str(tokenizer.chat_template)
        control = [*(str(token) for token in added if token.special), *tokenizer.all_special_tokens]
        # Not each added token is a mark: some vocabularies have line ends, or tags of HTML.
        marks = [word for word in map(str, added) if word.strip() and word in template]
        self._spelt = _any_of(control)
        self._spelt_by_tools = _any_of([*control, *marks, *TOOL_MARKS])

    def messages(self, messages: Sequence[Message]) -> list[Shaped]:
        """Each of them `in_shape`; raises `MessagesError`."""
        if not messages:
            raise MessagesError("there must be at least one message, got none")
        shaped = map(in_shape, messages)
        return [
            self._broken(each, self._spelt_by_tools if each["role"] == "tool" else self._spelt)
            for each in shaped
        ]

    def tools(self, tools: Sequence[ToolSpec]) -> list[Shaped]:
        """The same descriptions; raises `MessagesError` for one that names no function."""
        for tool in tools:
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise MessagesError(
                    f"a tool must be an object with function.name, got {str(tool)[:80]!r}"
                )
        return [self._broken(tool, self._spelt_by_tools) for tool in tools]

    def _broken(self, value: object, spelt: re.Pattern[str]) -> Any:
        """The same with a space in all that is `spelt` in a text, and all of it UTF-8."""
        if isinstance(value, str):
            text = value.encode("utf-8", "replace").decode()  # halves of surrogates have none
            return spelt.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        if isinstance(value, Mapping):
            return {
                self._broken(key, spelt): self._broken(each, spelt) for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._broken(each, spelt) for each in value]
        return value


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(set(tokens), key=len, reverse=True)
    words = [re.escape(token) for token in longest_first if len(token) > 1]
    return re.compile("|".join(words) or r"(?!)")


def in_shape(message: Message) -> Shaped:
    """Its content as one text, and the arguments of its calls as mappings.

    Raises `MessagesError` for what is no message.
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise MessagesError(
            f"a message must be an object with a role of {known}, got {str(message)[:80]!r}"
        )
    shaped = {**message, "content": text_of(message.get("content"))}
    calls = shaped.pop("tool_calls", None)
    return shaped | ({"tool_calls": [_with_mapping(call) for call in calls]} if calls else {})


def text_of(content: object) -> str:
    """One text of a message's content, which may come in parts.

    >>> text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    'ab'
    """
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list | tuple) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise MessagesError(f"content must be text, or parts of text, got {str(content)[:80]!r}")
    return "".join(map(str, texts))


def _with_mapping(call: Any) -> Shaped:
    """A call of an earlier turn with its arguments as a mapping, which templates write."""
    try:
        function = call["function"]
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, Mapping) or not isinstance(function["name"], str):
            raise TypeError("arguments must be an object, and the name a text")
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        raise MessagesError(
            f"a call must be an object with function.name and function.arguments as JSON of an "
            f"object, got {str(call)[:80]!r}: {error}"
        ) from error
    return {**call, "function": {**function, "arguments": arguments}}
