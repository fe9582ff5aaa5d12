"""Answers to chats and completions, by OpenAI's own models; and those of vLLM's with token ids.

Legend: a choice is one of the `n` answers to a request.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, get_args

from openai import BaseModel
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from async_grpo.environments.chat.messages import Reply
from async_grpo.types import Turn

Decode = Callable[[Sequence[int]], str]
Json = dict[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredChoice:
    """One answer of the model, to any kind of request."""

    index: int
    turn: Turn
    reply: Reply  # to a completion: its text alone
    logprobs: Json | None = None

    @property
    def ended(self) -> str:
        """Why the turn ended: at its `stop`, or at its `length`."""
        return "stop" if self.turn.finish_reason == "stop" else "length"

    @property
    def called_or_ended(self) -> str:
        """The same of a turn that may have called tools."""
        is_called = any(not call.problem for call in self.reply.tool_calls)
        return "tool_calls" if is_called else self.ended


@dataclass(slots=True)
class ChatForm:
    """How the answer to one request is written: whole, or as the events of a stream."""

    model: str
    has_usage: bool = False  # a stream ends with it
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    prefix: ClassVar[str] = "chatcmpl-"  # of the answer's id
    kinds: ClassVar[tuple[type[BaseModel], ...]] = ChatCompletion, ChatCompletionChunk
    last: ClassVar[str] = "data: [DONE]\n\n"  # of a stream, after its events

    def whole(self, choices: Sequence[AnsweredChoice], num_prompt: int) -> BaseModel:
        """The answer; `num_prompt`: tokens of the prompts."""
        made = list(map(self._choice, choices))
        return self._made(self.kinds[0], made, usage=usage(num_prompt, choices))

    def begin(self) -> Iterator[BaseModel]:
        """The events before any token is sampled."""
        yield from ()

    def piece(self, text: str) -> Iterator[BaseModel]:
        """The events of more text of the only choice, while it is sampled."""
        yield self._made(self.kinds[1], [self._delta(0, {"role": "assistant", "content": text})])

    def end(
        self, choices: Sequence[AnsweredChoice], num_prompt: int, *, num_sent: int
    ) -> Iterator[BaseModel]:
        """The rest, of an answer of whose text `num_sent` characters were sent."""
        for choice in choices:
            for part in self._rest(choice, num_sent):
                yield self._made(self.kinds[1], [part])
        if self.has_usage:
            yield self._made(self.kinds[1], [], usage=usage(num_prompt, choices))

    def _made(self, kind: type[BaseModel], choices: Sequence[object], **more: object) -> BaseModel:
        """An answer or an event."""
        (name,) = get_args(kind.model_fields["object"].annotation)
        heading = {"id": self.prefix + self.id, "object": name, "created": self.created}
        # `construct` would take ten times as long.
        return kind.model_validate({**heading, "model": self.model, "choices": choices, **more})

    def _choice(self, choice: AnsweredChoice) -> Json:
        end = {"finish_reason": choice.called_or_ended, "logprobs": choice.logprobs}
        return {"index": choice.index, "message": choice.reply.message(), **end}

    def _delta(self, index: int, delta: Json, **end: object) -> object:
        return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None} | end

    def _rest(self, choice: AnsweredChoice, num_sent: int) -> Iterator[object]:
        message, index = choice.reply.message(), choice.index
        calls = [{"index": i, **call} for i, call in enumerate(message.pop("tool_calls", ()))]
        message["content"] = message["content"][num_sent:]
        yield self._delta(index, message, logprobs=choice.logprobs)
        if calls:
            yield self._delta(index, {"tool_calls": calls})
        yield self._delta(index, {}, finish_reason=choice.called_or_ended)


class CompletionForm(ChatForm):
    """The same of /v1/completions."""

    __slots__ = ()
    prefix = "cmpl-"
    kinds = Completion, Completion

    def _choice(self, choice: AnsweredChoice, num_sent: int = 0) -> Json:
        end = {"finish_reason": choice.ended, "logprobs": choice.logprobs}
        return {"index": choice.index, "text": choice.reply.content[num_sent:], **end}

    def _delta(self, index: int, delta: Json, **end: object) -> CompletionChoice:
        # Its model is that of a choice that has ended.
        text = delta["content"]
        return CompletionChoice.model_construct(
            index=index, text=text, finish_reason=None, logprobs=None
        )

    def _rest(self, choice: AnsweredChoice, num_sent: int) -> Iterator[Json]:
        yield self._choice(choice, num_sent)


def usage(num_prompt: int, choices: Sequence[AnsweredChoice]) -> CompletionUsage:
    """The tokens of the prompts and of all choices."""
    num_output = sum(len(choice.turn.token_ids) for choice in choices)
    return CompletionUsage(
        prompt_tokens=num_prompt,
        completion_tokens=num_output,
        total_tokens=num_prompt + num_output,
    )


def event(data: BaseModel) -> str:
    """One server-sent event; those of /v1/responses have a name."""
    name = f"event: {data.type}\n" if hasattr(data, "type") else ""
    return f"{name}data: {data.to_json(indent=None, warnings=False)}\n\n"


def chat_logprobs(turn: Turn, decode: Decode) -> Json:
    """The log-probability of each sampled token, in the form of a chat."""
    content = []
    for token_id, logprob in zip(turn.token_ids.tolist(), turn.logprobs.tolist(), strict=True):
        text = decode([token_id])
        fields = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        content.append({**fields, "top_logprobs": []})
    return {"content": content, "refusal": None}


def completion_logprobs(turn: Turn, decode: Decode) -> Json:
    """The log-probability of each sampled token, in the form of a completion."""
    tokens = [decode([token_id]) for token_id in turn.token_ids.tolist()]
    starts = list(itertools.accumulate(map(len, tokens), initial=0))[:-1]
    fields = {"tokens": tokens, "token_logprobs": turn.logprobs.tolist(), "top_logprobs": None}
    return {**fields, "text_offset": starts}


def generated(index: int, turn: Turn) -> Json:
    """A choice of /inference/v1/generate, in vLLM's schema.

    `weight_versions`: which weights sampled which tokens; empty where weights never change.
    """
    pairs = zip(turn.token_ids.tolist(), turn.logprobs.tolist(), strict=True)
    content = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "top_logprobs": []}
        for token, logprob in pairs
    ]
    return {
        "index": index,
        "token_ids": turn.token_ids.tolist(),
        "finish_reason": turn.finish_reason,
        "logprobs": {"content": content},
        "weight_versions": [
            {"version": str(span.version), "start": span.start, "end": span.stop}
            for span in turn.weights_versions
        ],
    }
