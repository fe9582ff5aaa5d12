"""Requests in JSON: those of OpenAI's API, and those of vLLM's with token ids.

An option that changes how tokens are sampled, so that the trainer could not score them, is refused
unless the sampler ignores such options. Options without a meaning here are ignored, as other
servers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from openai.types.chat import ChatCompletionNamedToolChoiceParam
from openai.types.shared import (
    ErrorObject,
    ResponseFormatJSONObject,
    ResponseFormatJSONSchema,
    ResponseFormatText,
)
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from async_grpo.util.errors import AsyncGrpoError

Count = Annotated[int, Field(ge=1)]
OneOrMore = str | list[str]
ResponseFormat = ResponseFormatText | ResponseFormatJSONObject | ResponseFormatJSONSchema
Asked = TypeVar("Asked", bound=BaseModel)
T = TypeVar("T")
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
    "response_format": ({"type": "text"},),  # of all but chats
    "structured_outputs": (),
    "functions": ([],),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "top_logprobs": (0, 1),
    "prompt_logprobs": (),
    # Of /v1/responses, which keeps nothing: clients that ask for thoughts to send back get none.
    "background": (False,),
    "include": ([], ["reasoning.encrypted_content"]),
    "truncation": ("disabled",),
    **dict.fromkeys(("conversation", "previous_response_id", "prompt", "context_management"), ()),
    "max_tool_calls": (),
}


class Refused(AsyncGrpoError, ValueError):
    """A request that is not served, with the error that OpenAI's clients read."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def body(self) -> dict[str, Json]:
        """The answer's JSON.

        >>> Refused("no", status=401).body()["error"]["type"]
        'authentication_error'
        """
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error = ErrorObject(message=str(self), type=kind, param=None, code=self.code)
        return {"error": error.to_dict()}


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

    @property
    def has_usage(self) -> bool:
        """Whether a stream says at its end how many tokens it had."""
        return bool(self.stream_options and self.stream_options.include_usage)

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
    return checked(kind.model_validate_json, body)


def checked(validate: Callable[[T], Asked], content: T) -> Asked:
    """What `validate` makes of a request's content; raises `Refused` where it is not valid."""
    try:
        return validate(content)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"])) or "the body"
        raise Refused(f"{where}: {wrong['msg']}, got {str(wrong['input'])[:80]!r}") from error
