"""/v1/responses: its requests become chats, its answers and events are OpenAI's own models.

A request has to hold its whole input: nothing of it is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from openai import BaseModel
from openai.types import responses as models

from async_grpo.environments.chat.messages import Reply
from async_grpo.gateway import wire
from async_grpo.gateway.answer_plan import AnswerPlan, chat_plan
from async_grpo.gateway.answers import AnsweredChoice, ChatForm, usage
from async_grpo.gateway.session import Session

# What an answer repeats of its request, or the default.
TOLD: wire.Json = {
    "instructions": None, "parallel_tool_calls": True, "temperature": 1.0, "tool_choice": "auto",
    "tools": [], "text": {"format": {"type": "text"}},
}  # fmt: skip
SAME = ("temperature", "seed", "stop", "stop_token_ids", "parallel_tool_calls")  # as in a chat


class ResponsesRequest(wire.SamplingRequest):
    """The body of a request to /v1/responses."""

    input: str | list[wire.Json]
    instructions: str | None = None
    tools: list[wire.Json] | None = None
    tool_choice: str | wire.Json | None = None
    parallel_tool_calls: bool | None = None
    text: models.ResponseTextConfig | None = None
    max_output_tokens: wire.Count | None = None

    def chat(self) -> wire.ChatRequest:
        """The same as a chat; raises `Refused`."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        form = self.text.format.to_dict() if self.text and self.text.format else None
        if form and form["type"] == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        asked = {name: getattr(self, name) for name in SAME if name in self.model_fields_set}
        asked |= {
            "messages": [*system, *messages_of(self.input)],
            "tools": [_tool(tool) for tool in self.tools or []] or None,
            "tool_choice": choice,
            "response_format": form,
            "max_tokens": self.max_output_tokens,
        }
        return wire.checked(wire.ChatRequest.model_validate, asked)


def _tool(tool: wire.Json) -> wire.Json:
    if tool.get("type") != "function":
        raise wire.Refused(
            f"tools must be functions here, got one of type {tool.get('type')!r}: leave it out"
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def messages_of(items: str | Sequence[wire.Json]) -> list[wire.Json]:
    """The messages of an input; calls belong to the message that they stand behind.

    Raises `Refused` for an item that is of no chat.

    >>> messages_of([{"type": "function_call_output", "call_id": "a", "output": "5"}])
    [{'role': 'tool', 'tool_call_id': 'a', 'content': '5'}]
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            said = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append({"role": "tool", **said})
        elif kind != "reasoning":  # thoughts are those of the session, if the model reads them
            raise wire.Refused(
                "input must be of messages, function_call, function_call_output and reasoning, "
                f"got an item of type {kind!r}: leave it out"
            )
    return messages


async def response_plan(session: Session, asked: ResponsesRequest) -> AnswerPlan:
    """The plan for a response; raises `Refused`."""
    chat = asked.chat()
    chat.refuse_unserved(decides_sampling=session.sampler.decides_sampling)
    plan = await chat_plan(session, chat)
    return replace(plan, form=ResponseForm(plan.form.model, asked=asked))


@dataclass(slots=True, kw_only=True)
class ResponseForm(ChatForm):
    """The form of an answer of /v1/responses."""

    asked: ResponsesRequest
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of the events
    has_begun: bool = False  # its message, in the stream
    prefix = "resp_"
    last = ""

    def whole(self, choices: Sequence[AnsweredChoice], num_prompt: int) -> models.Response:
        """See `ChatForm`."""
        (choice,) = choices
        used = usage(num_prompt, choices)
        is_cut = choice.ended == "length"
        return self._response(
            "incomplete" if is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=self._items(choice.reply),
            usage={
                "input_tokens": used.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": used.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used.total_tokens,
            },
        )

    def begin(self) -> Iterator[BaseModel]:
        """See `ChatForm`."""
        response = self._response("in_progress", output=[])
        yield self._event(models.ResponseCreatedEvent, response=response)
        yield self._event(models.ResponseInProgressEvent, response=response)

    def piece(self, text: str) -> Iterator[BaseModel]:
        """See `ChatForm`; what comes in pieces is the only item."""
        yield from self._begun(0)
        yield self._event(models.ResponseTextDeltaEvent, **self._at(0), delta=text, logprobs=[])

    def end(
        self, choices: Sequence[AnsweredChoice], num_prompt: int, *, num_sent: int
    ) -> Iterator[BaseModel]:
        """See `ChatForm`."""
        response = self.whole(choices, num_prompt)
        for index, item in enumerate(response.output):
            if isinstance(item, models.ResponseOutputMessage):
                yield from self._rest_of_message(index, item, num_sent)
            else:
                yield from self._call_or_thoughts(index, item)
            yield self._event(models.ResponseOutputItemDoneEvent, output_index=index, item=item)
        is_cut = response.status == "incomplete"
        kind = models.ResponseIncompleteEvent if is_cut else models.ResponseCompletedEvent
        yield self._event(kind, response=response)

    def _begun(self, index: int) -> Iterator[BaseModel]:
        """The events with which a message begins, once."""
        if not self.has_begun:
            self.has_begun = True
            item = self._message(index, [], status="in_progress")
            yield self._event(models.ResponseOutputItemAddedEvent, output_index=index, item=item)
            at = self._at(index)
            yield self._event(models.ResponseContentPartAddedEvent, **at, part=_part(""))

    def _rest_of_message(
        self, index: int, item: models.ResponseOutputMessage, num_sent: int
    ) -> Iterator[BaseModel]:
        yield from self._begun(index)
        (part,), at = item.content, self._at(index)
        text = str(getattr(part, "text", ""))
        if rest := text[num_sent:]:
            yield self._event(models.ResponseTextDeltaEvent, **at, delta=rest, logprobs=[])
        yield self._event(models.ResponseTextDoneEvent, **at, text=text, logprobs=[])
        yield self._event(models.ResponseContentPartDoneEvent, **at, part=part)

    def _call_or_thoughts(self, index: int, item: models.ResponseOutputItem) -> Iterator[BaseModel]:
        added = models.ResponseOutputItemAddedEvent
        if not isinstance(item, models.ResponseFunctionToolCall):
            yield self._event(added, output_index=index, item=item)
            return
        begun = item.model_copy(update={"arguments": "", "status": "in_progress"})
        yield self._event(added, output_index=index, item=begun)
        at, said = {"output_index": index, "item_id": item.id}, item.arguments
        yield self._event(models.ResponseFunctionCallArgumentsDeltaEvent, **at, delta=said)
        done = models.ResponseFunctionCallArgumentsDoneEvent
        yield self._event(done, **at, arguments=said, name=item.name)

    def _event(self, kind: type[BaseModel], **fields: object) -> BaseModel:
        """An event, whose model allows one type only."""
        (name,) = get_args(kind.model_fields["type"].annotation)
        number = {"type": name, "sequence_number": next(self.numbers)}
        return kind.model_validate({**number, **fields})

    def _at(self, index: int) -> wire.Json:
        return {"item_id": f"msg_{self.id}_{index}", "output_index": index, "content_index": 0}

    def _response(self, status: str, **fields: object) -> models.Response:
        told = TOLD | self.asked.model_dump(include={*TOLD}, exclude_none=True, by_alias=True)
        told |= {"id": self.prefix + self.id, "object": "response", "model": self.model}
        made = float(self.created)
        return models.Response.construct(None, **told, created_at=made, status=status, **fields)

    def _items(self, reply: Reply) -> list[wire.Json]:
        """The items of a turn: its thoughts, its message unless it only calls, its calls."""
        message, items = reply.message(), list[wire.Json]()
        calls = message.get("tool_calls", ())
        if reply.reasoning:
            thoughts = [{"type": "reasoning_text", "text": reply.reasoning}]
            item = {"id": f"rs_{self.id}", "type": "reasoning"}
            items.append({**item, "summary": [], "content": thoughts})
        if message["content"] or not calls:
            items.append(self._message(len(items), [_part(message["content"])]))
        for call in calls:
            item = {"id": f"fc_{self.id}_{len(items)}", "type": "function_call"}
            items.append({**item, "status": "completed", "call_id": call["id"], **call["function"]})
        return items

    def _message(
        self, index: int, content: list[wire.Json], *, status: str = "completed"
    ) -> wire.Json:
        item = {"id": self._at(index)["item_id"], "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": content}


def _part(text: str) -> wire.Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
