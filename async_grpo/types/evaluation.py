"""What came of one set of held-out questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from async_grpo.types.message import Parcel
from async_grpo.types.weights import WeightsVersion


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
