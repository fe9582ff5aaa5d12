"""Renders by the model's own chat template, if that never rewrites earlier turns.

Such are ChatML without thinking (SmolLM2, Qwen2.5), and every other template that closes the
assistant's turn with a special token. Tool calls have the form of Hermes, which most models with
ChatML have learnt; the words of the system message are those of Qwen2.5's template.

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "2*3"}}
    </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from async_grpo.environments.chat.messages import (
    Cleaner,
    Message,
    MessagesError,
    Reply,
    Shaped,
    Tokenizer,
    ToolCall,
    ToolSpec,
    tool_spec,
    wrong_arguments,
)
from async_grpo.util.errors import UnfitModel

REMEDY = "name the renderer of its family with --renderer (see `pip install renderers`)"
MARK = "what-was-said"
ASKED: list[Shaped] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}]
THOUGHT = f"<think>\nb\n</think>\n\n{MARK}"
NAME = "probe-tool"
TOOL = tool_spec(NAME, "", {})
CALL = {"id": "1", "type": "function", "function": {"name": NAME, "arguments": {}}}
CALLED = [ASKED[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
HOW_TO_CALL = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n"
    "</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


class TemplateRenderer:
    """See `Renderer`; raises `UnfitModel` for a model whose template cannot serve."""

    is_plain = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokens = tokenizer.added_tokens_decoder
        control = [str(token) for token in tokens.values() if token.special]
        self._cleaner = Cleaner(tokenizer)
        if not tokenizer.chat_template:
            raise UnfitModel(f"{self._name} has no chat template: choose a chat model")
        self._end = self._end_of_turn(control)
        (self._end_id,) = (index for index, token in tokens.items() if str(token) == self._end)
        self._call_form = self._find_call_form()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """See `Renderer`."""
        last = self._tokenizer.eos_token_id
        return tuple(dict.fromkeys((self._end_id, *([] if last is None else [last]))))

    def calls(self, tools: Sequence[ToolSpec], *, is_one: bool) -> Shaped | None:
        """See `Renderer`."""
        if not tools or self._call_form == "unknown":
            return None
        functions = [tool["function"] for tool in tools]
        tags = [
            {
                "type": "tag",
                "begin": f'<tool_call>\n{{"name": {json.dumps(each["name"])}, "arguments": ',
                "content": json_tag(each.get("parameters") or {"type": "object"}),
                "end": "}\n</tool_call>",
            }
            for each in functions
        ]
        several = {"type": "tags_with_separator", "separator": "\n", "at_least_one": True}
        return {**several, "tags": tags, "stop_after_first": is_one}

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()) -> list[int]:
        """See `Renderer`."""
        return self._ids(self._text(*self._cleaner.clean(messages, tools), is_asked=True))

    def parse(
        self,
        sampled_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> Reply:
        """See `Renderer`."""
        ids = list(sampled_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return read_reply(text) if tools else Reply(text)

    def extend(
        self,
        prompt_ids: Sequence[int],
        *,
        sampled_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """See `Renderer`; a turn that was cut off gets its end token, which is not trained."""
        new, clean_tools = self._cleaner.clean(messages, tools)
        asked = self._text(ASKED, clean_tools)
        # Up to the end of the turn with `MARK`; some templates add a last end token.
        before = asked[: asked.rindex(MARK)] + MARK + self._end
        after = self._text([*ASKED, *new], clean_tools, is_asked=True)
        if not after.startswith(before):
            return None
        added = self._ids(after.removeprefix(before))
        is_cut = not sampled_ids or sampled_ids[-1] != self._end_id
        return [*prompt_ids, *sampled_ids, *([self._end_id] * is_cut), *added]

    def _text(
        self, messages: Sequence[Shaped], tools: Sequence[Shaped] = (), *, is_asked: bool = False
    ) -> str:
        """The template's text; `is_asked`: up to the start of the model's next turn."""
        has_tools = tools or any(m["role"] == "tool" or "tool_calls" in m for m in messages)
        if has_tools and self._call_form == "unknown":
            form = "writes tool calls in a form of its own"
            raise MessagesError(f"the chat template of {self._name} {form}: {REMEDY}")
        if has_tools and self._call_form == "none":
            messages, tools = flattened(messages, tools), ()
        return self._templated(messages, tools, is_asked=is_asked)

    def _templated(
        self, messages: Sequence[Shaped], tools: Sequence[object], *, is_asked: bool = False
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=is_asked,
                tokenize=False,
            )
        except Exception as error:  # a template is a program and may raise anything
            raise MessagesError(
                f"the chat template of {self._name} does not take these messages: {error}"
            ) from error
        return str(text)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _end_of_turn(self, control: Sequence[str]) -> str:
        """The token that ends the assistant's turn.

        Raises `UnfitModel` if there is none, or if the template rewrites earlier turns.
        """
        thought = [ASKED[0], {"role": "assistant", "content": THOUGHT}]
        before, after = (self._templated(said, ()) for said in (thought, [*thought, ASKED[0]]))
        rest = before.rpartition(MARK)[2]
        end = max((token for token in control if rest.startswith(token)), key=len, default="")
        if not end:
            raise self._refusal("closes the assistant's turn with no token of its own")
        if f"{THOUGHT}{end}" not in before or not after.startswith(before.removesuffix(rest) + end):
            raise self._refusal("rewrites what was said in earlier turns")
        return end

    def _find_call_form(self) -> str:
        """How the template writes tools: `hermes`, `unknown` (another form), or `none`."""
        if NAME not in self._templated(ASKED, [TOOL]):
            return "none"
        try:
            text = self._templated(CALLED, [TOOL])
        except MessagesError:
            return "unknown"
        names = [call.name for call in read_reply(text).tool_calls]  # the instructions' first
        return "hermes" if names[-1:] == [NAME] else "unknown"

    @property
    def _name(self) -> str:
        return str(getattr(self._tokenizer, "name_or_path", "") or "the model")

    def _refusal(self, why: str) -> UnfitModel:
        return UnfitModel(f"the chat template of {self._name} {why}: {REMEDY}")


def json_tag(schema: object) -> Shaped:
    """The grammar of JSON that fits this schema, as a structural tag; models may love blanks."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 2}


def read_reply(text: str) -> Reply:
    """The content and the calls of a turn, also those that cannot be called.

    >>> read_reply('So:\\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>').content
    'So:'
    """
    calls = tuple(_read_call(found) for found in BLOCK.finditer(text))
    return Reply(BLOCK.sub("", text).strip() if calls else text, calls)


def flattened(messages: Sequence[Shaped], tools: Sequence[Shaped]) -> list[Shaped]:
    """The conversation for a template without tools: these and their calls become text."""
    flat = [_plain(message) for message in messages]
    if tools:
        listed = HOW_TO_CALL.format(tools="\n".join(map(json.dumps, tools)))
        system = [flat.pop(0)["content"]] if flat[0]["role"] == "system" else []
        flat.insert(0, {"role": "system", "content": "\n\n".join([*system, listed])})
    return flat


def _plain(message: Shaped) -> Shaped:
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
