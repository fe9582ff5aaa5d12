"""Tool calls as Hermes writes them, which most models with ChatML have learnt.

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "2*3"}}
    </tool_call>

The words of the system message are those of Qwen2.5's chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from async_grpo.environments.chat.base import Reply, ToolCall, wrong_arguments

BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
HOW_TO_CALL = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n"
    "</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


def read_reply(text: str) -> Reply:
    """What a turn says beside its calls, and the calls, broken ones too.

    >>> read_reply('So:\\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>').content
    'So:'
    """
    calls = tuple(_read_call(found) for found in BLOCK.finditer(text))
    return Reply(BLOCK.sub("", text).strip() if calls else text, calls)


def flattened(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The same conversation for a template that knows no tools: they and their calls are text."""
    flat = [_plain(message) for message in messages]
    if tools:
        listed = HOW_TO_CALL.format(tools="\n".join(map(json.dumps, tools)))
        system = [flat.pop(0)["content"]] if flat[0]["role"] == "system" else []
        flat.insert(0, {"role": "system", "content": "\n\n".join([*system, listed])})
    return flat


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps({k: call['function'][k] for k in ('name', 'arguments')})}\n"
        "</tool_call>"
        for call in message.get("tool_calls", ())
    ]
    return {"role": message["role"], "content": "\n".join([*([content] * bool(content)), *calls])}


def _read_call(found: re.Match[str]) -> ToolCall:
    text, body, end = found[0], found[1].strip(), found[2]
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        unclosed = "" if end else ", and the call does not end with </tool_call>"
        return ToolCall("", {}, f"this call is no JSON: {error}{unclosed}", text)
    name = call.get("name") if isinstance(call, Mapping) else None
    if not isinstance(name, str):
        return ToolCall("", {}, "a call must be a JSON object with a name", text)
    arguments = call.get("arguments", {})
    if problem := wrong_arguments(arguments):
        return ToolCall(name, {}, problem, text)
    if not end:
        return ToolCall(name, arguments, "the call does not end with </tool_call>", text)
    return ToolCall(name, arguments)
