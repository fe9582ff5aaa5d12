"""What trainer ranks receive, and what they report.

Legend: T packed tokens of a minibatch, S packed sequences, N trained (unmasked output) tokens,
U tokens of the sequences, each with its prompt; T = U where no prompt is shared.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from async_grpo.types.message import Parcel, packed, unpacked
from async_grpo.types.runs import Control
from async_grpo.types.samples import RowKey, Sample, Ticket
from async_grpo.types.snapshots import WeightsVersion

if TYPE_CHECKING:
    import torch

DIGESTS = 1 << 64


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch(Parcel):
    """One rank's share of one round, with one row a sample (`Sample.parts`).

    Without samples the rank trains a filler, whose gradient is 0.
    """

    round_index: int
    samples: tuple[Sample, ...]
    # A teacher's hidden states or logits, {name of the score: [N, K]} of the trained tokens in the
    # order of packing, as they came: too large to be copied. They never leave the rank.
    dense: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def parts(self) -> list[Sample]:
        """The rows as one sample each, in the order of packing."""
        return [part for sample in self.samples for part in sample.parts()]

    def __reduce__(self) -> tuple[object, ...]:
        """Keep tickets out of the pickled bytes, because Ray must see their references."""
        if not any(sample.tickets for sample in self.samples):
            return Parcel.__reduce__(self)  # super() fails in a dataclass with slots
        bare = tuple(replace(sample, tickets=()) for sample in self.samples)
        tickets = [sample.tickets for sample in self.samples]
        return _with_tickets, (packed(bare), tickets, self.round_index)


def _with_tickets(
    values: bytes, tickets: Sequence[tuple[Ticket, ...]], round_index: int
) -> Minibatch:
    pairs = zip(unpacked(values), tickets, strict=True)
    return Minibatch(round_index, tuple(replace(sample, tickets=own) for sample, own in pairs))


class Tally(NamedTuple):
    """Sums over the samples of one gradient step on one rank, in any order.

    What the batcher has sent must equal what the rank has trained.
    """

    num_samples: int = 0
    num_tokens: int = 0  # unmasked
    digest: int = 0  # identifies the samples: see `digest_of`
    weight: float = 0.0  # Σ w_i m_it

    def plus(self, other: Tally) -> Tally:
        return Tally(
            self.num_samples + other.num_samples,
            self.num_tokens + other.num_tokens,
            (self.digest + other.digest) % DIGESTS,
            self.weight + other.weight,
        )


def tally(
    samples: Iterable[Sample], *, incarnation: int, aggregation: str, constant_length: int = 0
) -> Tally:
    """The tally of samples that are about to be sent to a rank."""
    keys, num_samples, num_tokens, weight = [], 0, 0, 0.0
    for part in (part for sample in samples for part in sample.parts()):
        keys.append(part.key)
        num_here = part.num_trained_tokens - part.num_trained_elsewhere
        num_samples += part.row == 0  # a sample is counted where its first row is trained
        num_tokens += num_here
        weight += num_here * token_weight(part.num_trained_tokens, aggregation, constant_length)
    return Tally(num_samples, num_tokens, digest_of(keys, incarnation=incarnation), weight)


def token_weight(num_trained: int, aggregation: str, constant_length: int) -> float:
    """The weight w_i of each token of a sample of `num_trained` unmasked tokens.

    >>> [token_weight(4, name, 8) for name in ("sample-mean", "token-mean", "constant")]
    [0.25, 1.0, 0.125]
    """
    if aggregation == "sample-mean":
        return 1.0 / max(num_trained, 1)
    if aggregation == "token-mean":
        return 1.0
    if aggregation == "constant" and constant_length > 0:
        return 1.0 / constant_length
    raise ValueError(
        "aggregation must be sample-mean, token-mean or constant with a positive length, got "
        f"{aggregation!r} with {constant_length}: see --aggregation"
    )


def digest_of(keys: Iterable[RowKey], *, incarnation: int) -> int:
    """The sum, modulo 2^64, of a hash of each key and the run's incarnation.

    >>> one, two = (7, 0, 0, 0), (7, 0, 1, 0)
    >>> digest_of([one, two], incarnation=3) == digest_of([two, one], incarnation=3)
    True
    >>> len({digest_of(keys, incarnation=3) for keys in ([one], [two], [one, one], [one, two])})
    4
    """
    return sum(_hash(incarnation, *key) for key in keys) % DIGESTS


def _hash(*numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The state of a batcher at the end of a gradient step, from which another can go on.

    Work that had begun for later steps is counted as discarded and done again.
    """

    batch: int  # of the next gradient step
    step_in_batch: int
    ledger: Mapping[str, object]  # `Ledger.state()`: plain JSON values
    quarantined: tuple[int, ...] = ()  # indices of questions that kill workers


@dataclass(frozen=True, slots=True)
class EndOfStep(Parcel):
    """Ends a gradient step on every rank, with denominators that are known only now."""

    batch: int
    step_in_batch: int
    is_last_of_batch: bool
    num_samples: int  # D of sample-mean and constant: trained + zero contribution
    num_tokens: int  # D of token-mean: unmasked output tokens of the same samples
    incarnation: int = 0  # of the run: it enters the digests in `sent`
    # What was sent to each rank, which depends on which rank was ready when.
    sent: tuple[Tally, ...] = field(default=(), compare=False)
    fates: Mapping[str, int] = field(default_factory=dict)  # samples by fate, this step
    reasons: Mapping[str, int] = field(default_factory=dict)  # of these, by "fate: reason"
    # Tokens that engines have sampled, by fate and by "fate: reason".
    tokens: Mapping[str, int] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)  # numerators and denominators
    # Seconds by stage, and retries, since the step before; they differ between equal runs.
    clock: Mapping[str, float] = field(default_factory=dict, compare=False)
    notices: tuple[str, ...] = field(default=(), compare=False)  # sentences for people
    resume: ResumePoint | None = field(default=None, compare=False, repr=False)  # for rank 0 alone
    # At a batch's end: the requests that have come meanwhile, and the options that from the next
    # batch on differ from those of the run's start.
    controls: tuple[Control, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    # Evaluations that have ended since the step before; for rank 0 alone.
    evaluations: tuple[EvaluationResult, ...] = field(default=(), compare=False)


StreamItem = Minibatch | EndOfStep
# The answer to one request of a rank: a minibatch, the end of its step, or both in this order.
StreamItems = tuple[StreamItem, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PackedMinibatch:
    """Samples of one rank, packed end to end without padding, ready for the model.

    Position `logit_positions[n]` of the packed row predicts `target_ids[n]`; per-token arrays of
    length N follow that order, sample after sample.

    Sequences that begin alike may be a trie: what they share lies in the row once, with the first
    of them. Token u of the whole sequences is then token `repeat_index[u]` of the row, and token t
    of the row is the first time token `first_index[t]` of the whole sequences.
    """

    input_ids: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64, of each token in its sequence
    cu_seqlens: torch.Tensor  # [S+1] int32, in [0, U]
    max_seqlen: int  # tokens of the longest sequence
    logit_positions: torch.Tensor  # [N] int64, in [0, T), where tokens are predicted
    target_ids: torch.Tensor  # [N] int64, the tokens
    sample_index: torch.Tensor  # [N] int64, in [0, S), which packed row a token is of
    weights: torch.Tensor  # [N] float32, w_i of the aggregation; 0 in a filler
    advantages: torch.Tensor  # [N] float32
    behaviour_logprobs: torch.Tensor  # [N] float32, of the engine
    scores: Mapping[str, torch.Tensor]  # [N] or [N, K], as `Sample.scores`; ids are int64
    num_rows: int  # S, but 0 for a filler
    num_samples: int  # whose first row is here
    is_given: torch.Tensor | None = None  # [N] bool: not sampled but given; None: all were sampled
    repeat_index: torch.Tensor | None = None  # [U] int64, in [0, T); None: nothing is shared
    first_index: torch.Tensor | None = None  # [T] int64, in [0, U)
    is_trie: bool = False  # sequences share more than whole prompts
    # [T, layers * chosen] int16, experts that the engine chose; -1: the model chooses. None: all.
    experts: torch.Tensor | None = None
    num_rerouted: int = 0  # prompts that stand here again, because other experts computed them


class QuestionOutcome(NamedTuple):
    """The samples of one question, which are all graded, or all counted as failed."""

    dataset_type: str
    num_samples: int
    num_correct: int = 0  # with the full reward of 1
    reward_sum: float = 0.0
    num_tokens: int = 0  # sampled
    num_truncated: int = 0  # samples that were cut
    failure: str = ""  # the stage that lost the samples; empty: they are graded


@dataclass(frozen=True, slots=True)
class EvaluationResult(Parcel):
    """One set, sampled and graded once; a count is of graded samples unless it says otherwise."""

    name: str  # of the set; empty: that of --eval-data-path
    version: WeightsVersion  # that was to be evaluated
    oldest: WeightsVersion  # of any token: `version`, unless no worker could keep serving it
    newest: WeightsVersion  # likewise
    samples_per_question: int
    questions: tuple[QuestionOutcome, ...]
    seconds: float
    skipped: str = ""  # why nothing was sampled

    @classmethod
    def without(
        cls, name: str, version: WeightsVersion, samples_per_question: int, *, why: str
    ) -> EvaluationResult:
        """The result of a set of which nothing was sampled."""
        return cls(name, version, version, version, samples_per_question, (), 0.0, skipped=why)

    @property
    def graded(self) -> tuple[QuestionOutcome, ...]:
        return tuple(each for each in self.questions if not each.failure)

    @property
    def num_questions(self) -> int:
        """All questions, failed ones too."""
        return len(self.questions)

    @property
    def num_samples(self) -> int:
        return sum(each.num_samples for each in self.graded)

    @property
    def num_failed(self) -> int:
        return sum(each.num_samples for each in self.questions) - self.num_samples

    @property
    def failures(self) -> Mapping[str, int]:
        """Failed samples by the stage that lost them."""
        found = Counter[str]()
        for each in self.questions:
            if each.failure:
                found[each.failure] += each.num_samples
        return dict(found)

    @property
    def reward_sum(self) -> float:
        return sum(each.reward_sum for each in self.graded)

    @property
    def num_correct(self) -> int:
        return sum(each.num_correct for each in self.graded)

    @property
    def num_solved(self) -> int:
        """Questions with at least one correct sample."""
        return sum(each.num_correct > 0 for each in self.graded)

    @property
    def by_type(self) -> Mapping[str, EvaluationResult]:
        """The result of each type of questions."""
        types = dict.fromkeys(each.dataset_type for each in self.questions)
        return {
            kind: replace(
                self, questions=tuple(q for q in self.questions if q.dataset_type == kind)
            )
            for kind in types
        }
