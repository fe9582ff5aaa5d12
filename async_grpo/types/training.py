"""What trainer ranks receive, and what they make of it.

Legend: T packed tokens of a minibatch, S packed sequences, N trained (unmasked output) tokens,
U tokens of the sequences, each with its prompt; T = U where no prompt is shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from async_grpo.types.message import Parcel, packed, unpacked
from async_grpo.types.runs import Control
from async_grpo.types.samples import Sample, Ticket
from async_grpo.types.snapshots import WeightsVersion
from async_grpo.types.tally import Tally

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch(Parcel):
    """One rank's share of one round, each sample with one row (`Sample.parts`).

    No samples: the rank trains an inert filler.
    """

    round_index: int
    samples: tuple[Sample, ...]

    def parts(self) -> list[Sample]:
        """One a row, in the order in which they are packed."""
        return [part for sample in self.samples for part in sample.parts()]

    def __reduce__(self) -> tuple[object, ...]:
        """Tickets stay outside of the bytes: Ray must see the references that it counts."""
        if not any(sample.tickets for sample in self.samples):
            return Parcel.__reduce__(self)  # a class with slots has no super() of its own here
        bare = tuple(replace(sample, tickets=()) for sample in self.samples)
        tickets = [sample.tickets for sample in self.samples]
        return _with_tickets, (packed(bare), tickets, self.round_index)


def _with_tickets(
    values: bytes, tickets: Sequence[tuple[Ticket, ...]], round_index: int
) -> Minibatch:
    pairs = zip(unpacked(values), tickets, strict=True)
    return Minibatch(round_index, tuple(replace(sample, tickets=own) for sample, own in pairs))


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a batcher can go on: the end of a gradient step, before anything of the next one.

    What had begun of later steps is counted as discarded, and in flight again.
    """

    batch: int  # of the next gradient step
    step_in_batch: int
    ledger: Mapping[str, object]  # `Ledger.state()`: plain JSON values
    quarantined: tuple[int, ...] = ()  # indices of questions that kill workers


@dataclass(frozen=True, slots=True)
class EndOfStep(Parcel):
    """Closes a gradient step on every rank, with the denominators nobody could know earlier."""

    batch: int
    step_in_batch: int
    is_last_of_batch: bool
    num_samples: int  # D of sample-mean and constant: trained + zero contribution
    num_tokens: int  # D of token-mean: unmasked output tokens of the same samples
    incarnation: int = 0  # of the run, which makes the digests in `sent` its own
    # What each rank was given to train, which depends on who was ready when.
    sent: tuple[Tally, ...] = field(default=(), compare=False)
    fates: Mapping[str, int] = field(default_factory=dict)  # samples by fate, this step
    reasons: Mapping[str, int] = field(default_factory=dict)  # of these, by "fate: reason"
    # That engines have answered, by fate and by "fate: reason".
    tokens: Mapping[str, int] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)  # numerators and denominators
    # Seconds by stage, and retries, since the step before: what no two runs share.
    clock: Mapping[str, float] = field(default_factory=dict, compare=False)
    notices: tuple[str, ...] = field(default=(), compare=False)  # sentences for people
    resume: ResumePoint | None = field(default=None, compare=False, repr=False)  # rank 0's alone
    # At a batch's end: what was asked meanwhile, and the options that are other than at the run's
    # start from the next batch on.
    controls: tuple[Control, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    # Of sets that have ended since the step before; rank 0's alone, too.
    evaluations: tuple[EvaluationResult, ...] = field(default=(), compare=False)


StreamItem = Minibatch | EndOfStep
# What one request of a rank is answered: a minibatch, the end of its step, or both in this order.
StreamItems = tuple[StreamItem, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PackedMinibatch:
    """Samples of one rank laid end to end without padding, ready for the model.

    Position `logit_positions[n]` of the packed row predicts `target_ids[n]`; per-token arrays of
    length N follow that order, sample after sample.

    A prompt that several samples share may lie in the row once, with the first of them. Token u of
    the whole sequences is then token `repeat_index[u]` of the row, and token t of the row is the
    first time token `first_index[t]` of the whole sequences.
    """

    input_ids: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64, of each token in its sequence
    cu_seqlens: torch.Tensor  # [S+1] int32, in [0, U]
    max_seqlen: int
    logit_positions: torch.Tensor  # [N] int64, in [0, T)
    target_ids: torch.Tensor  # [N] int64
    sample_index: torch.Tensor  # [N] int64, in [0, S)
    weights: torch.Tensor  # [N] float32, w_i of the aggregation; 0 in a filler
    advantages: torch.Tensor  # [N] float32
    behaviour_logprobs: torch.Tensor  # [N] float32
    scores: Mapping[str, torch.Tensor]  # [N] or [N, K], as `Sample.scores`; ids are int64
    num_rows: int  # S, but 0 for a filler
    num_samples: int  # those whose first row is here
    is_given: torch.Tensor | None = None  # [N] bool: nobody sampled these; None: all were sampled
    repeat_index: torch.Tensor | None = None  # [U] int64, in [0, T); None: no prompt is shared
    first_index: torch.Tensor | None = None  # [T] int64, in [0, U)


class QuestionOutcome(NamedTuple):
    """Of one question: its samples are graded together, or counted together as failed."""

    dataset_type: str
    num_samples: int
    num_correct: int = 0  # with the full reward of 1
    reward_sum: float = 0.0
    num_tokens: int = 0  # that were sampled
    num_truncated: int = 0  # samples that were cut
    failure: str = ""  # the stage that lost them; empty: they are graded


@dataclass(frozen=True, slots=True)
class EvaluationResult(Parcel):
    """One set, sampled and graded once; the properties count graded samples, where not failed."""

    name: str  # of the set; empty: that of --eval-data-path
    version: WeightsVersion  # that was to be evaluated
    oldest: WeightsVersion  # of any token: `version`, unless nobody could keep it
    newest: WeightsVersion  # likewise
    samples_per_question: int
    questions: tuple[QuestionOutcome, ...]
    seconds: float
    skipped: str = ""  # why nothing was sampled

    @classmethod
    def without(
        cls, name: str, version: WeightsVersion, samples_per_question: int, *, why: str
    ) -> EvaluationResult:
        """That of a set of which nothing was sampled."""
        return cls(name, version, version, version, samples_per_question, (), 0.0, skipped=why)

    @property
    def graded(self) -> tuple[QuestionOutcome, ...]:
        return tuple(each for each in self.questions if not each.failure)

    @property
    def num_questions(self) -> int:
        """All of them."""
        return len(self.questions)

    @property
    def num_samples(self) -> int:
        return sum(each.num_samples for each in self.graded)

    @property
    def num_failed(self) -> int:
        return sum(each.num_samples for each in self.questions) - self.num_samples

    @property
    def failures(self) -> Mapping[str, int]:
        """Samples that failed, by the stage that lost them."""
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
        """The same of each type of questions."""
        types = dict.fromkeys(each.dataset_type for each in self.questions)
        return {
            kind: replace(
                self, questions=tuple(q for q in self.questions if q.dataset_type == kind)
            )
            for kind in types
        }
