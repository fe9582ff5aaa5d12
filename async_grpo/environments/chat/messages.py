"""Messages to a model and from it, dialogues of them, and what writes them as token ids.

A message is one of OpenAI's chat protocol, a mapping with `role`, `content`, `tool_calls`; a tool
is described as there, see `tool_spec`.

Texts of users and tools are not trusted. A text that spells a control token of the model, such as
the end of a turn, would be read as that token, and could speak for the user or for the model. So
`Cleaner` breaks control tokens. In what tools write it also breaks the marks of the chat format
that tokenizers do not call special, such as the end of a result; a user may mean `<think>`.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from async_grpo.util.errors import AsyncGrpoError

if TYPE_CHECKING:
    from async_grpo.environments.base import Policy

MAX_DEPTH = 64  # of a call's arguments, which templates and JSON write by recursion
ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
Message = Mapping[str, Any]
ToolSpec = Mapping[str, Any]
Shaped = dict[str, Any]  # a message or a tool as templates take it
Tokenizer = Any  # Hugging Face's, or an object with those of its members that are used here


class MessagesError(AsyncGrpoError, ValueError):
    """Messages or descriptions of tools that this model's chat format cannot hold."""


def tool_spec(name: str, description: str, parameters: object) -> ToolSpec:
    """The description of a tool; `parameters`: the JSON schema of its arguments."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One attempt of the model to call a tool."""

    name: str
    arguments: Mapping[str, object]
    problem: str = ""  # why it cannot be called, in words for the model; empty: it can
    text: str = ""  # what the model wrote, if it cannot be called
    id: str = field(default_factory=lambda: f"call-{uuid.uuid4().hex[:16]}")


def wrong_arguments(arguments: object) -> str:
    """Why these cannot be the arguments of a call, in words for the model; empty: they can.

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
    """One turn of the model, parsed."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""

    def message(self) -> Shaped:
        """The assistant's message; calls with a problem stand in its content, as they were written.

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
    """Writes messages in the chat format of a family of models; not thread-safe."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn of the model."""

    @property
    def is_plain(self) -> bool:
        """Whether a turn without tools is all content: no thoughts, no marks."""

    def calls(self, tools: Sequence[ToolSpec], *, is_one: bool) -> Shaped | None:
        """The grammar of calls of these tools, as a structural tag of xgrammar's; None: none here.

        `is_one`: of exactly one call, else of one or more.
        """

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()) -> list[int]:
        """The ids of a whole conversation, up to the start of the model's next turn.

        Raises `MessagesError`.
        """

    def parse(
        self,
        sampled_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> Reply:
        """The model's turn; without `tools` it has no calls."""

    def extend(
        self,
        prompt_ids: Sequence[int],
        *,
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """The next prompt: both id sequences unchanged, then `messages`, up to the next turn.

        None if the chat format rewrites earlier messages, so that only `render` is right.
        Raises `MessagesError`.
        """


class Cleaner:
    """Breaks the control tokens of a tokenizer wherever a text spells them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added, template = tokenizer.added_tokens_decoder.values(), str(tokenizer.chat_template)
        control = [*(str(token) for token in added if token.special), *tokenizer.all_special_tokens]
        # Added tokens that the template does not use are no marks: line ends, tags of HTML.
        marks = [word for word in map(str, added) if word.strip() and word in template]
        self._spelt = _any_of(control)
        self._spelt_by_tools = _any_of([*control, *marks, *TOOL_MARKS])

    def clean(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[list[Shaped], list[Shaped]]:
        """The messages, each `in_shape`, and the descriptions of tools.

        Raises `MessagesError` for what is no message, and for a tool that names no function.
        """
        if not messages:
            raise MessagesError("there must be at least one message, got none")
        clean = [
            self._broken(each, self._spelt_by_tools if each["role"] == "tool" else self._spelt)
            for each in map(in_shape, messages)
        ]
        for tool in tools:
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise MessagesError(
                    f"a tool must be an object with function.name, got {str(tool)[:80]!r}"
                )
        return clean, [self._broken(tool, self._spelt_by_tools) for tool in tools]

    def _broken(self, value: object, spelt: re.Pattern[str]) -> Any:
        """The JSON value in valid UTF-8, with a space in each match of `spelt` in its texts."""
        if isinstance(value, str):
            text = value.encode("utf-8", "replace").decode()  # lone surrogates have no bytes
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
    """The message with its content as one text, and the arguments of its calls as mappings.

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
    """The content of a message as one text; it may come in parts.

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
    """A call of an earlier turn with its arguments as a mapping, as templates take it."""
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


@dataclass(frozen=True, slots=True, eq=False)
class _PastTurn:
    """One turn of the model."""

    messages: tuple[str, ...]  # keys of the messages before it, and of its message
    prompt_ids: Sequence[int]
    sampled_ids: Sequence[int]

    def is_before(self, messages: tuple[str, ...]) -> bool:
        """Whether `messages` begin with all messages of this turn, and have more."""
        num_messages = len(self.messages)
        return num_messages < len(messages) and messages[:num_messages] == self.messages


class Dialogue:
    """One conversation, or several that share beginnings, with one set of tools.

    The caller keeps the messages, and passes all of them each time. Messages that begin with those
    of an earlier turn of the model extend its ids; other messages are rendered anew, and begin
    another row unless their ids happen to agree.
    """

    def __init__(self, renderer: Renderer, *, tools: Sequence[ToolSpec] = ()) -> None:
        self._renderer = renderer
        self._tools = tuple(tools)
        self._turns: list[_PastTurn] = []

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn of the model."""
        return self._renderer.stop_token_ids

    @property
    def is_plain(self) -> bool:
        """Whether `text` of the first ids of a turn is the start of its content."""
        return self._renderer.is_plain and not self._tools

    def calls(self, tools: Sequence[ToolSpec], *, is_one: bool) -> Shaped | None:
        """See `Renderer`."""
        return self._renderer.calls(tools, is_one=is_one)

    def text(self, sampled_ids: Sequence[int]) -> str:
        """The content of a turn, or of the part of it that there is."""
        return self._renderer.parse(sampled_ids).content

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids from which the model continues; raises `MessagesError`."""
        keys = tuple(map(_key, messages))
        begun = [turn for turn in self._turns if turn.is_before(keys)]
        if begun:
            last = max(begun, key=lambda turn: len(turn.messages))
            extended = self._renderer.extend(
                last.prompt_ids,
                sampled_ids=last.sampled_ids,
                messages=messages[len(last.messages) :],
                tools=self._tools,
            )
            if extended is not None:
                return extended
        return self._renderer.render(messages, tools=self._tools)

    def heard(
        self,
        messages: Sequence[Message],
        *,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        shown: Callable[[str], str] = str,
    ) -> Reply:
        """Record and read the model's turn after `prompt_ids`, which `prompt(messages)` gave.

        `shown`: from its content to what the caller sees of it, and puts into later messages.
        """
        reply = self._renderer.parse(sampled_ids, prompt_ids=prompt_ids, tools=self._tools)
        reply = replace(reply, content=shown(reply.content))
        keys = (*map(_key, messages), _key(reply.message()))
        self._turns.append(_PastTurn(keys, prompt_ids, [int(token) for token in sampled_ids]))
        return reply

    async def reply(
        self, policy: Policy, messages: Sequence[Message], *, max_tokens: int | None = None
    ) -> Reply:
        """Sample one turn of the policy, and read it."""
        prompt_ids = self.prompt(messages)
        turn = await policy.sample(prompt_ids, max_tokens=max_tokens, stop=self.stop_token_ids)
        return self.heard(messages, prompt_ids=prompt_ids, sampled_ids=turn.token_ids.tolist())


def _key(message: Message) -> str:
    """The same for all copies of a message, whatever a client did to them.

    Clients leave out thoughts, write JSON in their own way, and write None for an empty text.
    """
    shaped = in_shape(message)
    calls = [call["function"] for call in shaped.get("tool_calls", ())]
    called = [(function["name"], function["arguments"]) for function in calls]
    who = [shaped["role"], shaped.get("tool_call_id") or ""]
    return json.dumps([*who, shaped["content"], called], sort_keys=True)
