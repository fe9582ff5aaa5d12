"""What a client may ask: OpenAI's requests, and vLLM's of token ids.

An option that would change how is sampled, and that the trainer could not score, is refused unless
the sampler decides anyway; options that mean nothing here are passed over, as other servers do.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from async_grpo.gateway.base import Refused

Count = Annotated[int, Field(ge=1)]
OneOrMore = str | list[str]
R = TypeVar("R", bound="SamplingRequest")
MAX_CHOICES = 64
MAX_STOPS = 64  # each is looked for in every text
LEAST_TEMPERATURE = 1e-9  # below it, but for 0, log-probabilities are not finite
LARGEST_SEED = 2**63 - 1 - MAX_CHOICES  # of an engine, whose choices count on from it
# What each option may be where the temperature is all that sampling knows.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
}
# What would change the answer, and is not served.
UNSERVED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "top_logprobs": (0, 1),
    "prompt_logprobs": (),
}


class StreamOptions(BaseModel):
    """How a stream ends."""

    include_usage: bool = False


class SamplingRequest(BaseModel):
    """What all requests have in common."""

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
    """Of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None

    @property
    def longest(self) -> int | None:
        """The longest output."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Those that the model may call."""
        is_off = (self.model_extra or {}).get("tool_choice") == "none"
        return [] if is_off else self.tools or []


class CompletionRequest(SamplingRequest):
    """Of /v1/completions."""

    prompt: OneOrMore | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


class GenerateParams(SamplingRequest):
    """How /inference/v1/generate samples: some of vLLM's `SamplingParams`."""

    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


class GenerateRequest(BaseModel):
    """Of /inference/v1/generate: token ids in, token ids out."""

    model: str | None = None
    request_id: str | None = None
    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    sampling_params: GenerateParams
    stream: bool = False


def read(body: bytes, kind: type[BaseModel]) -> Any:
    """The request; raises `Refused` for what is none."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"])) or "the body"
        raise Refused(f"{where}: {wrong['msg']}, got {str(wrong['input'])[:80]!r}") from error
