"""Requests and answers in JSON: those of OpenAI's API, and those of vLLM's with token ids.

An option that changes how tokens are sampled, so that the trainer could not score them, is refused
unless the sampler ignores such options. Options without a meaning here are ignored, as other
servers do.

Legend: a choice is one of the `n` answers to a request.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from openai.types.chat import ChatCompletionNamedToolChoiceParam
from openai.types.shared import (
    ResponseFormatJSONObject,
    ResponseFormatJSONSchema,
    ResponseFormatText,
)
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from async_grpo.environments.chat.messages import Reply
from async_grpo.types import Turn
from async_grpo.util.errors import AsyncGrpoError

Count = Annotated[int, Field(ge=1)]
OneOrMore = str | list[str]
ResponseFormat = ResponseFormatText | ResponseFormatJSONObject | ResponseFormatJSONSchema
Asked = TypeVar("Asked", bound=BaseModel)
Json = dict[str, object]
MAX_CHOICES = 64
MAX_STOPS = 64  # every text is searched for each of them
LEAST_TEMPERATURE = 1e-9  # above 0 and below this, log-probabilities are not finite
LARGEST_SEED = 2**63 - 1 - MAX_CHOICES  # choice i is sampled with the seed + i
# The values with which each option changes nothing, where tokens are sampled by temperature alone.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
}
# Options that would change the answer and are not served, with the values that change nothing.
UNSERVED: dict[str, tuple[object, ...]] = {
    "functions": ([],),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "top_logprobs": (0, 1),
    "prompt_logprobs": (),
}
Decode = Callable[[Sequence[int]], str]
DONE = "data: [DONE]\n\n"


class Refused(AsyncGrpoError, ValueError):
    """A request that is not served, with the error that OpenAI's clients read."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def body(self) -> dict[str, object]:
        """The answer's JSON.

        >>> Refused("no", status=401).body()["error"]["type"]
        'authentication_error'
        """
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class StreamOptions(BaseModel):
    """What a stream ends with."""

    include_usage: bool = False


class SamplingRequest(BaseModel):
    """The fields that all requests have in common."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), le=LARGEST_SEED)] | None = None
    stop: OneOrMore | None = None
    stop_token_ids: list[int] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("temperature")
    @classmethod
    def _can_sample(cls, value: float) -> float:
        if 0 < value < LEAST_TEMPERATURE:
            raise ValueError(f"must be 0, or at least {LEAST_TEMPERATURE:g}")
        return value

    @field_validator("stop")
    @classmethod
    def _can_end(cls, value: OneOrMore | None) -> OneOrMore | None:
        stops = [value] if isinstance(value, str) else value or []
        if "" in stops or len(stops) > MAX_STOPS:
            raise ValueError(f"must be at most {MAX_STOPS} texts, none of them empty")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end a turn."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def refuse_unserved(self, *, decides_sampling: bool) -> None:
        """Raise `Refused` for an option that would not be followed."""
        allowed = UNSERVED if decides_sampling else UNSERVED | NEUTRAL
        for name, value in (self.model_extra or {}).items():
            neutral = allowed.get(name)
            if neutral is not None and value is not None and value not in neutral:
                legal = " or ".join(map(repr, neutral)) or "left out"
                raise Refused(f"{name} must be {legal} here, got {value!r}: leave it out")


class ChatRequest(SamplingRequest):
    """The body of a request to /v1/chat/completions."""

    messages: list[Json]
    tools: list[Json] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChatCompletionNamedToolChoiceParam | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None

    @property
    def longest(self) -> int | None:
        """The most tokens of an output; None: as many as fit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[Json]:
        """The tools that the model reads of."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def must_call(self) -> bool:
        """Whether a turn without a call does not follow the request."""
        return self.tool_choice not in ("auto", "none", None)

    @property
    def callable_tools(self) -> list[Json]:
        """The tools that the model may call: only the named one, where the choice names one."""
        if not isinstance(self.tool_choice, dict):
            return self.offered_tools
        name = self.tool_choice["function"]["name"]
        return [tool for tool in self.offered_tools if _name(tool) == name]

    @property
    def content_schema(self) -> object:
        """The JSON schema that the content has to fit; None: it may be any text."""
        if isinstance(self.response_format, ResponseFormatJSONSchema):
            return self.response_format.json_schema.schema_ or {}
        is_json = isinstance(self.response_format, ResponseFormatJSONObject)
        return {"type": "object"} if is_json else None

    def refuse_unserved(self, *, decides_sampling: bool) -> None:
        """Raise `Refused` for an option that would not be followed."""
        super().refuse_unserved(decides_sampling=decides_sampling)
        if self.must_call and not self.callable_tools:
            raise Refused(
                "tool_choice must be left out unless tools has what it requires, got "
                f"{self.tool_choice!r} with {[_name(tool) for tool in self.offered_tools]}: add it"
            )


def _name(tool: Any) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


class CompletionRequest(SamplingRequest):
    """The body of a request to /v1/completions."""

    prompt: OneOrMore | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


class GenerateParams(SamplingRequest):
    """How /inference/v1/generate samples: some of vLLM's `SamplingParams`."""

    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


class GenerateRequest(BaseModel):
    """The body of a request to /inference/v1/generate: token ids in, token ids out."""

    model: str | None = None
    request_id: str | None = None
    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    sampling_params: GenerateParams
    stream: bool = False


def read_request(body: bytes, kind: type[Asked]) -> Asked:
    """The request in `body`; raises `Refused` for a body that is not valid."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"])) or "the body"
        raise Refused(f"{where}: {wrong['msg']}, got {str(wrong['input'])[:80]!r}") from error


@dataclass(frozen=True, slots=True)
class Heading:
    """The fields that all parts of one answer have in common."""

    prefix: str  # of the answer's id
    kind: str  # the field `object`
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, choices: Sequence[object], *, is_chunk: bool = False, **more: object) -> Json:
        """The answer with these choices, or a part of it."""
        kind = f"{self.kind}.chunk" if is_chunk and self.kind == "chat.completion" else self.kind
        heading = {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created}
        return {**heading, "model": self.model, "choices": choices, **more}


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredChoice:
    """One answer of the model, to any kind of request."""

    index: int
    turn: Turn
    reply: Reply  # to a completion: its text alone
    logprobs: Json | None = None

    @property
    def finish_reason(self) -> str:
        """Why the turn ended."""
        is_called = any(not call.problem for call in self.reply.tool_calls)
        return "tool_calls" if is_called else self.turn.finish_reason

    def message(self) -> Json:
        """The choice of a chat."""
        end = {"finish_reason": self.finish_reason, "logprobs": self.logprobs}
        return {"index": self.index, "message": self.reply.message(), **end}

    def text(self, *, num_sent: int = 0) -> Json:
        """The choice of a completion, without the characters that were sent before."""
        end = {"finish_reason": self.finish_reason, "logprobs": self.logprobs}
        return {"index": self.index, "text": self.reply.content[num_sent:], **end}

    def deltas(self, *, is_chat: bool, num_sent: int) -> Iterator[Json]:
        """The rest of a streamed choice, of whose content `num_sent` characters were sent."""
        if not is_chat:
            yield self.text(num_sent=num_sent)
            return
        message = self.reply.message()
        calls = [{"index": i, **call} for i, call in enumerate(message.pop("tool_calls", ()))]
        rest = chat_delta(self.index, message["content"][num_sent:])
        yield {**rest, "delta": message | rest["delta"], "logprobs": self.logprobs}
        if calls:
            yield {**rest, "delta": {"tool_calls": calls}}
        yield {**rest, "delta": {}, "finish_reason": self.finish_reason}


def usage(num_prompt: int, choices: Sequence[AnsweredChoice]) -> dict[str, int]:
    """The tokens of the prompts and of all choices."""
    num_output = sum(len(choice.turn.token_ids) for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


def event(data: Json) -> str:
    """One server-sent event.

    >>> event({"a": 1})
    'data: {"a": 1}\\n\\n'
    """
    return f"data: {json.dumps(data)}\n\n"


def chat_delta(index: int, text: str) -> dict[str, Any]:
    """A part of a chat's choice, while it is sampled."""
    delta = {"role": "assistant", "content": text}
    return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}


def completion_delta(index: int, text: str) -> Json:
    """A part of a completion's choice, while it is sampled."""
    return {"index": index, "text": text, "finish_reason": None, "logprobs": None}


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
