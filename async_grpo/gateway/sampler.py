"""Who samples for the gateway, what it is asked, and how a request is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from async_grpo.types import GenerationRequest, SamplingContract, Turn
from async_grpo.util.errors import AsyncGrpoError

Cut = Callable[[Turn], Turn]  # a turn without what comes after its end; itself: it may go on


@dataclass(frozen=True, slots=True)
class Ask:
    """One turn that is wanted."""

    prompt_ids: Sequence[int]
    max_tokens: int | None = None  # None: as many as there is room for
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    cut: Cut = lambda turn: turn

    def request(self, *, stop_ids: Sequence[int], longest: int) -> GenerationRequest:
        """For an engine: `stop_ids` are the model's own, `longest` is for who names no length."""
        stop_ids = tuple(dict.fromkeys((*stop_ids, *self.stop_ids)))
        sampling = SamplingContract(self.temperature, stop_ids, self.max_tokens or longest)
        return GenerationRequest(0, 0, np.array(self.prompt_ids, np.int32), 1, sampling, self.seed)


class Sampler(Protocol):
    """A model that goes on from token ids."""

    @property
    def name(self) -> str:
        """The model's; empty: it answers to every name."""

    @property
    def max_model_len(self) -> int:
        """The longest prompt with its output, in tokens."""

    @property
    def decides_sampling(self) -> bool:
        """Whether temperature and the like are its own, whatever a request says."""

    def sample(self, ask: Ask) -> AsyncIterator[Turn]:
        """The turn, in pieces as they come; who closes the iterator ends the sampling."""


class Refused(AsyncGrpoError, ValueError):
    """A request that is not served, as OpenAI's clients read it."""

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
