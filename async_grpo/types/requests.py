"""What workers and verifiers are asked.

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
    """One question to one worker: `num_samples` outputs that share the prompt's cache."""

    ordinal: int
    attempt: int
    input_token_ids: NDArray[np.int32]  # [P]
    num_samples: int
    sampling: SamplingContract
    seed: int | None = None  # None: the engine's own, faster, random state
    lease_id: int = 0  # by which the worker's pulse tells of it
    priority: int = 0  # the engine decodes lower ones first: an evaluation has 1


@dataclass(frozen=True, slots=True, eq=False)
class VerificationRequest(Message):
    """One output to grade: everything of the question, and the text."""

    ordinal: int
    index: int
    question: Question
    completion: Turn


@dataclass(frozen=True, slots=True, eq=False)
class GradingRequest(Parcel):
    """The outputs of one group, or some of them, to one verifier pool."""

    outputs: tuple[VerificationRequest, ...]
    lease_id: int = 0  # by which the pool's pulse tells of it
    rewards: tuple[str, ...] = ()  # adapters that grade them; none: all that the pool has


@dataclass(frozen=True, slots=True)
class Payload(Message):
    """What a teacher's distribution over each token travels as.

    `topk`: the K likeliest ids [L, K], their log-probabilities and the log of the rest's mass [L];
    `hidden`: the last hidden states [L, d]; `logits`: all logits [L, V].
    """

    kind: PayloadKind
    top_k: int  # K; 0 unless the kind is topk
    temperature: float  # of the distribution, for topk

    @property
    def columns(self) -> dict[str, int]:
        """{name: columns of each token}; 0 says one or more, as many as the teacher has."""
        if self.kind == "topk":
            return {"ids": self.top_k, "logprobs": self.top_k, "tail": 0}
        return {self.kind: 0}

    def bytes_per_token(self, *, hidden: int, logits: int) -> int:
        """What travels of one token, of a teacher whose states and logits have so many bytes.

        >>> Payload("topk", 64, 1.0).bytes_per_token(hidden=1152, logits=98_304)
        516
        """
        of_top_k = 8 * self.top_k + 4  # ids, log-probabilities, tail
        return {"topk": of_top_k, "hidden": hidden, "logits": logits}[self.kind]


@dataclass(frozen=True, slots=True, eq=False)
class LogprobRequest:
    """The rows of one group, to be scored by the reference model or a teacher."""

    prompt_token_ids: tuple[NDArray[np.int32], ...]  # [P] each
    output_token_ids: tuple[NDArray[np.int32], ...]  # [L] each
    temperature: float
    version: WeightsVersion | None  # exactly these weights; None: a teacher's own
    lease_id: int = 0  # by which the worker's pulse tells of it
    payload: Payload | None = None  # what else a teacher is asked
    vocab_size: int = 0  # of the student: a payload is over the tokens that both have

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed forward that answers it: every output has its prompt."""
        return sum(map(len, (*self.prompt_token_ids, *self.output_token_ids)))


@dataclass(frozen=True, slots=True)
class HeadRequest(Message):
    """For the head of a teacher's model, which ranks that get hidden states need."""

    lease_id: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class EpisodesRequest:
    """The episodes of one group to one environment worker."""

    ordinal: int
    attempt: int
    question: Question
    num_samples: int
    sampling: SamplingContract  # of each turn
    oldest: WeightsVersion  # every turn is of these weights or of later ones
    environment: UserCode
    max_row_tokens: int  # the longest prompt with its output that engine and trainer take
    idle_timeout_s: float  # in which the environment must ask for something
    run: RunId
    model: str  # whose chat format `services.dialogue` speaks, a folder or a name on a hub
    renderer: str  # of --renderer
    judges: tuple[str, ...] = ()  # of --judges: whom the environment may ask
    seed: int | None = None  # of which each turn has one of its own; None: the engine's
    turn_timeout_s: float = 0.0  # 0: a turn, and an episode, may take as long as they move
    episode_timeout_s: float = 0.0
    lease_id: int = 0  # under which it is played, and asks for turns


@dataclass(frozen=True, slots=True, eq=False)
class PlayedGroup:
    """What an environment worker answers."""

    episodes: tuple[Episode, ...]
    verdicts: tuple[Verdict, ...]
    num_judged: int = 0  # times that several judges were asked the same
    num_disagreed: int = 0  # of these, their verdicts were not all equal
    # What failed -> the episodes that were played again for it, and the tokens of their turns.
    again: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OutageRequest(Message):
    """To the controller: an episode waits for a server, for as long as this is unanswered."""

    dataset_type: str  # nothing of it starts or is trained meanwhile
    why: str


@dataclass(frozen=True, slots=True)
class ServiceRequest(Message):
    """To a worker of a service of the user's own, whose answer is bytes of the same kind."""

    content: bytes  # `message.packed`: what is inside may be known to the two ends alone
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class JudgeRequest:
    """Messages, as OpenAI's, to a worker of a judge."""

    messages: tuple[Mapping[str, object], ...]
    temperature: float
    max_tokens: int  # of the answer
    is_again: bool = False  # the answer before was no verdict
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class JudgeAnswer:
    """What a judge says, and what it cost."""

    text: str
    num_tokens: int  # read and written
