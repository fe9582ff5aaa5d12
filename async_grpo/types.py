"""The records that travel between rooms.

Frozen and slotted; `dataclasses.replace` adds fields as a sample moves on. Token ids are the truth
from sampling to loss: text travels for people and verifiers, and is never tokenised again.

Legend of array shapes: P prompt tokens, L output tokens, T packed tokens of a minibatch, S packed
sequences, N trained (unmasked output) tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort"]
VerdictStatus = Literal["scored", "unscorable", "error"]


class WeightsVersion(NamedTuple):
    """Which weights: the run's incarnation, and how many batches it had completed with them."""

    incarnation: int
    batches: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.batches}"

    @classmethod
    def parse(cls, text: str) -> WeightsVersion:
        """The inverse of `str`.

        >>> WeightsVersion.parse("2.17")
        WeightsVersion(incarnation=2, batches=17)
        """
        incarnation, batches = text.split(".")
        return cls(int(incarnation), int(batches))


class VersionSpan(NamedTuple):
    """Output tokens [start, stop) of a completion were sampled with `version`."""

    version: WeightsVersion
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One line of the user's data, tokenised."""

    input_token_ids: NDArray[np.int32]  # [P]
    input: str
    answer: str | None
    columns: Mapping[str, Any]  # every column of the user's line, untouched


@dataclass(frozen=True, slots=True, eq=False)
class TrainingPair:
    """One line of supervised data, tokenised; only the completion is trained."""

    prompt_token_ids: NDArray[np.int32]  # [P]
    completion_token_ids: NDArray[np.int32]  # [L], with the end token


@dataclass(frozen=True, slots=True)
class SamplingContract:
    """What decides log-probabilities; shared by engine, reference and trainer."""

    temperature: float
    stop_token_ids: tuple[int, ...]  # trained on, as the last token of a finished output
    max_tokens: int  # longest output, in tokens


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """One question to one worker: `num_samples` outputs that share the prompt's cache."""

    ordinal: int
    attempt: int
    input_token_ids: NDArray[np.int32]  # [P]
    num_samples: int
    sampling: SamplingContract
    seed: int | None = None  # None: the engine's own, faster, random state


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled output, as the engine reported it."""

    token_ids: NDArray[np.int32]  # [L]
    logprobs: NDArray[np.float32]  # [L] behaviour log-probability, at the sampling temperature
    weights_versions: tuple[VersionSpan, ...]  # covers [0, L)
    loss_mask: NDArray[np.bool_]  # [L] False: read by the model, not trained
    finish_reason: FinishReason
    text: str  # decoded for verifiers and people, without special tokens


@dataclass(frozen=True, slots=True, eq=False)
class VerificationRequest:
    """One output to grade: everything of the question, and the text."""

    ordinal: int
    index: int
    question: Question
    completion: Completion


@dataclass(frozen=True, slots=True, eq=False)
class LogprobRequest:
    """The outputs of one group, to be scored by the reference model."""

    prompt_token_ids: NDArray[np.int32]  # [P]
    output_token_ids: tuple[NDArray[np.int32], ...]  # [L] each
    temperature: float
    version: WeightsVersion  # exactly these weights, no later ones

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed forward that answers it: every output repeats the prompt."""
        return sum(len(self.prompt_token_ids) + len(ids) for ids in self.output_token_ids)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifiers say of one output.

    `scored` and `unscorable` (no answer could be found: a bad answer) carry a reward; an `error`
    says that verification itself failed, and is never a reward of 0.
    """

    status: VerdictStatus
    reward: float
    format_reward: float | None
    adapter: str  # whose reward counts
    reason: str  # empty when scored
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One output of one question with everything the loss needs."""

    ordinal: int
    index: int  # within its group
    question: Question
    completion: Completion
    verdict: Verdict
    advantage: float
    reference_logprobs: NDArray[np.float32] | None = None  # [L], None when the KL coefficient is 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens: what the sample costs of a token budget."""
        return len(self.question.input_token_ids) + len(self.completion.token_ids)

    @property
    def num_trained_tokens(self) -> int:
        """Unmasked output tokens: the L_i of the loss."""
        return int(self.completion.loss_mask.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """All outputs of one question at one attempt."""

    ordinal: int
    attempt: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """One rank's share of one round. No samples: the rank trains an inert filler."""

    round_index: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class EndOfStep:
    """Closes a gradient step on every rank, with the denominators nobody could know earlier."""

    batch: int
    step_in_batch: int
    is_last_of_batch: bool
    num_samples: int  # D of sample-mean and constant: trained + zero contribution
    num_tokens: int  # D of token-mean: unmasked output tokens of the same samples
    fates: Mapping[str, int] = field(default_factory=dict)  # samples by fate, this step
    sums: Mapping[str, float] = field(default_factory=dict)  # numerators and denominators


StreamItem = Minibatch | EndOfStep


@dataclass(frozen=True, slots=True, eq=False)
class PackedMinibatch:
    """Samples of one rank laid end to end without padding, ready for the model.

    Position `logit_positions[n]` of the packed row predicts `target_ids[n]`; per-token arrays of
    length N follow that order, sample after sample.
    """

    input_ids: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64, restarts at 0 with every sequence
    cu_seqlens: torch.Tensor  # [S+1] int32
    max_seqlen: int
    logit_positions: torch.Tensor  # [N] int64, in [0, T)
    target_ids: torch.Tensor  # [N] int64
    sample_index: torch.Tensor  # [N] int64, in [0, S)
    weights: torch.Tensor  # [N] float32, w_i of the aggregation; 0 in a filler
    advantages: torch.Tensor  # [N] float32
    behaviour_logprobs: torch.Tensor  # [N] float32
    reference_logprobs: torch.Tensor | None  # [N] float32
    num_samples: int  # 0 for a filler


class TensorMeta(NamedTuple):
    """Where one parameter lies in a bucket of bytes."""

    name: str
    dtype: str  # as torch names it: "float32", "bfloat16"
    shape: tuple[int, ...]
    offset_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class WeightsBucket:
    """Some whole parameters as one run of bytes in the object store."""

    tensors: tuple[TensorMeta, ...]
    data: Any  # ObjectRef of a [size_bytes] uint8 array, owned by trainer rank 0
    size_bytes: int
    checksum: int  # xxh3_64 of the bytes


@dataclass(frozen=True, slots=True, eq=False)
class WeightsSnapshot:
    """A full set of weights that any worker can load, now or when it joins later."""

    version: WeightsVersion
    buckets: tuple[WeightsBucket, ...]

    @property
    def size_bytes(self) -> int:
        return sum(bucket.size_bytes for bucket in self.buckets)


@dataclass(frozen=True, slots=True)
class WeightsAck:
    """A worker serves `version`; what the change cost it."""

    worker_id: str
    version: WeightsVersion
    seconds: float  # receiving, verifying and loading
    pause_seconds: float  # generation stood still


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Who serves a snapshot, and who was fenced because it could not."""

    version: WeightsVersion
    acks: tuple[WeightsAck, ...]
    failures: Mapping[str, str]  # worker id -> reason


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself when it registers."""

    worker_id: str
    role: Literal["generation", "logprob"]
    node_id: str
    pid: int
    model_path: str
    vocab_size: int
    capacity: float  # sequences for generation, tokens for log-probabilities
    overhead: float  # accepted beyond the capacity, same unit
    max_model_len: int
    temperature: float | None = None  # None: whatever the trainer asks for


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """The right to send one piece of work straight to one worker."""

    lease_id: int
    worker_id: str
    handle: Any  # the worker's Ray actor handle
    cost: float
    version: WeightsVersion


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """What every stage is doing right now, for people; counts are of samples."""

    batch: int  # the oldest batch that is not completed
    generating: int
    verifying: int
    in_reference: int
    ready: int  # finished, waiting for a round
    training: int  # sent to trainers in the current gradient step
    done: int  # reached a fate since the start of the run
    output_tokens: int  # received since the start of the run
    reward_sum: float  # over reward_count graded samples since the start of the current batch
    reward_count: int
    workers: Mapping[str, int] = field(default_factory=dict)  # healthy workers by role
    problem: str = ""  # what the pipeline is waiting for, when it cannot move
