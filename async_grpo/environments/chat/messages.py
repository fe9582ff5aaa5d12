"""Messages from outside, put into the one shape that renderers read, without control tokens.

Texts of users and tools come from anywhere. One that spells a control token of the model's, such as
the end of a turn, would be read as that token, and could speak for the user or for the model. What
tools say spells no mark of the chat format either, such as the end of a result, which tokenizers do
not call special; in a prompt of the user's `<think>` may be meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from async_grpo.environments.chat.base import Message, MessagesError, ToolSpec

ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


class Cleaner:
    """Cleans for a tokenizer: Hugging Face's, or anything with the members of theirs used here."""

    def __init__(self, tokenizer: Any) -> None:
        added, template = tokenizer.added_tokens_decoder.values(), str(tokenizer.chat_template)
        control = [*(str(token) for token in added if token.special), *tokenizer.all_special_tokens]
        # Not each added token is a mark: some vocabularies have line ends, or tags of HTML.
        marks = [word for word in map(str, added) if word.strip() and word in template]
        self._spelt = _any_of(control)
        self._spelt_by_tools = _any_of([*control, *marks, *TOOL_MARKS])

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Each of them `in_shape`; raises `MessagesError`."""
        if not messages:
            raise MessagesError("there must be at least one message, got none")
        shaped = map(in_shape, messages)
        return [
            self._broken(each, self._spelt_by_tools if each["role"] == "tool" else self._spelt)
            for each in shaped
        ]

    def tools(self, tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
        """The same descriptions; raises `MessagesError` for one that names no function."""
        for tool in tools:
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise MessagesError(
                    f"a tool must be an object with function.name, got {str(tool)[:80]!r}"
                )
        return [self._broken(tool, self._spelt_by_tools) for tool in tools]

    def _broken(self, value: Any, spelt: re.Pattern[str]) -> Any:
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


def in_shape(message: Message) -> dict[str, Any]:
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


def text_of(content: Any) -> str:
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


def _with_mapping(call: Any) -> dict[str, Any]:
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
