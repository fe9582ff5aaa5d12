"""Which slots of a batch ask a question and which are groups of given pairs; what each of them is.

Slot o asks a question where floor((o + 1) λ) > floor(o λ), with λ the share of sampled slots (a
Beatty sequence). Of all sequences it is the most even: any n consecutive slots hold n λ sampled
ones, to less than one slot. Nothing but the ordinal decides, so a resumed run has the same slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from async_grpo.data.stream import QuestionStream


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedOrder:
    """Questions and pairs by slot; each kind has its own epochs, none of which skips a line."""

    sampled_share: float  # λ in [0, 1], as the user wrote it: 0.1 is a tenth
    questions: QuestionStream
    pairs: QuestionStream
    samples_per_slot: int

    def question(self, ordinal: int) -> int:
        """Index of the question that a sampled slot asks."""
        return self.questions.index(self._num_sampled(ordinal))

    def pairs_of(self, ordinal: int) -> tuple[int, ...]:
        """Indices of the pairs of a slot, a sample each; empty where it asks a question.

        >>> order = MixedOrder(sampled_share=0.5, questions=QuestionStream(9, seed=0),
        ...                    pairs=QuestionStream(4, seed=1), samples_per_slot=2)
        >>> [order.pairs_of(ordinal) for ordinal in range(4)]
        [(2, 3), (), (0, 1), ()]
        """
        before = self._num_sampled(ordinal)
        if self._num_sampled(ordinal + 1) > before:
            return ()
        first = (ordinal - before) * self.samples_per_slot
        return tuple(self.pairs.index(first + i) for i in range(self.samples_per_slot))

    def _num_sampled(self, ordinal: int) -> int:
        """Of the slots before this one."""
        # Of its decimal digits: in binary 0.7 is a little less than seven tenths.
        return ordinal * Fraction(str(self.sampled_share)) // 1
