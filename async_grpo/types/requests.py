"""Requests to workers and verifiers, and some answers.

Legend: P prompt tokens, L output tokens, K tokens of the vocabulary, V all of them, d hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from async_grpo.types.message import Message, Parcel
from async_grpo.types.runs import RunId
from async_grpo.types.samples import Episode, Question, SamplingContract, Turn, Verdict
from async_grpo.types.snapshots import WeightsVersion
from async_grpo.util.user_code import UserCode

PayloadKind = Literal["topk", "hidden", "logits"]


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest(Message):
    """Asks a generation worker for `num_samples` outputs, which share the prompt's KV cache.

    `begun`: a turn of each, with what lost workers had sampled of it up to a cut. Outputs that were
    finished come back as they are, the others with these tokens first.
    """

    ordinal: int
    attempt: int
    input_token_ids: NDArray[np.int32]  # [P]
    num_samples: int
    sampling: SamplingContract
    seed: int | None = None  # None: the engine's random state, which is faster
    lease_id: int = 0  # the request's key in the worker's pulse
    priority: int = 0  # the engine decodes lower ones first: an evaluation has 1
    begun: tuple[Turn, ...] = ()
    with_cuts: bool = False  # the worker's pulses tell what the outputs have so far


@dataclass(frozen=True, slots=True, eq=False)
class VerificationRequest(Message):
    """One output to grade, with its question."""

    ordinal: int
    index: int
    question: Question
    completion: Turn


@dataclass(frozen=True, slots=True, eq=False)
class GradingRequest(Parcel):
    """Asks a verifier pool to grade the outputs of one group, or some of them."""

    outputs: tuple[VerificationRequest, ...]
    lease_id: int = 0  # the request's key in the pool's pulse
    rewards: tuple[str, ...] = ()  # adapters that grade them; empty: all that the pool has


@dataclass(frozen=True, slots=True)
class Payload(Message):
    """The form in which a teacher's distribution over each token is sent.

    `topk`: the K likeliest ids [L, K], their log-probabilities and the log of the rest's mass [L];
    `hidden`: the last hidden states [L, d]; `logits`: all logits [L, V].
    """

    kind: PayloadKind
    top_k: int  # K; 0 unless the kind is topk
    temperature: float  # of the distribution, for topk

    @property
    def columns(self) -> dict[str, int]:
        """{name: columns of each token}; 0: one value, or as many as the teacher's width."""
        if self.kind == "topk":
            return {"ids": self.top_k, "logprobs": self.top_k, "tail": 0}
        return {self.kind: 0}

    def bytes_per_token(self, *, hidden: int, logits: int) -> int:
        """Bytes for one token; `hidden`, `logits`: bytes of the teacher's state and logits of it.

        >>> Payload("topk", 64, 1.0).bytes_per_token(hidden=1152, logits=98_304)
        516
        """
        of_top_k = 8 * self.top_k + 4  # ids, log-probabilities, tail
        return {"topk": of_top_k, "hidden": hidden, "logits": logits}[self.kind]


@dataclass(frozen=True, slots=True, eq=False)
class LogprobRequest:
    """Asks the reference model or a teacher to score the rows of one group."""

    prompt_token_ids: tuple[NDArray[np.int32], ...]  # [P] each
    output_token_ids: tuple[NDArray[np.int32], ...]  # [L] each
    temperature: float
    version: WeightsVersion | None  # exactly these weights score; None: a teacher's
    lease_id: int = 0  # the request's key in the worker's pulse
    payload: Payload | None = None  # what a teacher sends beside log-probabilities
    vocab_size: int = 0  # of the student: a payload is over the tokens that both models have

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed forward pass: every output with its prompt."""
        return sum(map(len, (*self.prompt_token_ids, *self.output_token_ids)))


@dataclass(frozen=True, slots=True)
class HeadRequest(Message):
    """Asks for the head of a teacher's model, which ranks need for its hidden states."""

    lease_id: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class EpisodesRequest:
    """Asks an environment worker to play the episodes of one group."""

    ordinal: int
    attempt: int
    question: Question
    num_samples: int
    sampling: SamplingContract  # of each turn
    oldest: WeightsVersion  # every turn is sampled with these weights or later ones
    environment: UserCode
    max_row_tokens: int  # the longest prompt with its output that engine and trainer take
    idle_timeout_s: float  # the longest time between two requests of the environment
    run: RunId
    model: str  # with the chat format of `services.dialogue`: a folder or a name on a hub
    renderer: str  # of --renderer
    judges: tuple[str, ...] = ()  # of --judges: those that the environment may ask
    seed: int | None = None  # from which each turn's seed is made; None: the engine's state
    turn_timeout_s: float = 0.0  # 0: a turn or an episode has no limit while it makes progress
    episode_timeout_s: float = 0.0
    constrains: bool = False  # of --constrained-outputs: grammars of turns are followed
    lease_id: int = 0  # of the episodes and their requests for turns


@dataclass(frozen=True, slots=True, eq=False)
class PlayedGroup:
    """An environment worker's answer to `EpisodesRequest`."""

    episodes: tuple[Episode, ...]
    verdicts: tuple[Verdict, ...]
    num_judged: int = 0  # questions that went to several judges
    num_disagreed: int = 0  # of these, questions on which their verdicts differed
    # {cause: (episodes that were played again, tokens of their turns)}
    again: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutageRequest(Message):
    """Tells the controller that an episode waits for a server, until this request is answered."""

    dataset_type: str  # groups of this type neither start nor are trained meanwhile
    why: str


@dataclass(frozen=True, slots=True)
class ServiceRequest(Message):
    """A request to a user's service, which answers in bytes of the same kind."""

    content: bytes  # of `message.packed`: perhaps only the two ends can import its classes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class JudgeRequest:
    """Messages in OpenAI's format for a judge worker."""

    messages: tuple[Mapping[str, object], ...]
    temperature: float
    max_tokens: int  # of the answer
    is_again: bool = False  # the previous answer was no verdict
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class JudgeAnswer:
    """A judge's answer and its cost."""

    text: str
    num_tokens: int  # read and written


@dataclass(slots=True, eq=False)
class Hold:
    """For one evaluation, a worker that keeps its weights while others get newer ones.

    If the worker is lost, another may take its place.
    """

    version: WeightsVersion  # the evaluated one
    worker_id: str = ""  # empty: training cannot spare a worker


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationTerms:
    """The terms of all requests for one set of held-out questions."""

    name: str = ""  # of the set
    rewards: tuple[str, ...] = ()  # which grade its outputs; empty: those of a question's type
    hold: Hold | None = None  # of the worker that samples it; None: any worker does

    @property
    def is_counted(self) -> bool:
        """Whether its samples count as load of a worker.

        If not, they come on top of the load, few at a time, and no sample for training waits.
        """
        return self.hold is None or bool(self.hold.worker_id)
