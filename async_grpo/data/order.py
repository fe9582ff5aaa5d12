"""The order of what a run trains: which question or which pairs each slot of a batch has.

Questions of one kind come by an endless seeded permutation that is read at any ordinal. It depends
on the seed and the number of questions alone, not on ranks, workers or on what was read before, so
a resumed run continues it from an ordinal. All randomness is hashed or counter-based and the same
on every machine and numpy version.

Slot o asks a question where floor((o + 1) λ) > floor(o λ), with λ the share of sampled slots (a
Beatty sequence); the others have given pairs. Of all sequences it is the most even: any n
consecutive slots hold n λ sampled ones, to less than one slot.

Of B slots a type with the share p of the questions has floor(p λ B) or ceil(p λ B) in every batch:
each gets its floor, and those that lag most behind their share get one more. Nothing but the
ordinal decides any of it.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class QuestionStream:
    """Indices into `num_questions` questions by ordinal 0, 1, 2 ..., each epoch a permutation."""

    num_questions: int
    _: KW_ONLY
    seed: int
    purpose: str = "epoch"  # streams of the same seed for several purposes are independent

    def index(self, ordinal: int) -> int:
        """The question at `ordinal`, at random access."""
        epoch, position = divmod(ordinal, self.num_questions)
        return int(_permutation(self.num_questions, self.seed, epoch, self.purpose)[position])

    def replacement(self, slot: int, *, attempt: int) -> int:
        """The question drawn for ordinal `slot` at its `attempt`-th replacement (from 1).

        Its own stream: replacing a question moves no other.
        """
        return _hash("replacement", self.seed, slot, attempt) % self.num_questions


@functools.lru_cache(maxsize=32)  # a batch may straddle two epochs of each type, and of pairs
def _permutation(num_questions: int, seed: int, epoch: int, purpose: str) -> NDArray[np.int64]:
    # Sorting raw words, because only bit generators promise the same numbers for ever.
    words = np.random.Philox(key=_hash(purpose, seed, epoch)).random_raw(num_questions)
    return np.argsort(words, kind="stable")


def sampling_seed(run_seed: int, *, ordinal: int, attempt: int) -> int:
    """A seed for the engine's samples of one question, in [0, 2**63): it fits a signed int64."""
    return _hash("sampling", run_seed, ordinal, attempt) >> 1


def _hash(purpose: str, *numbers: int) -> int:
    """64 bits that depend on all of `numbers`, and differ between purposes."""
    # Wrapped, so that negative seeds are seeds too.
    words = struct.pack(f"<{len(numbers)}Q", *(number % 2**64 for number in numbers))
    digest = hashlib.blake2b(words, digest_size=8, person=purpose.encode())
    return int.from_bytes(digest.digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedOrder:
    """Questions and pairs by slot; each kind has its own epochs, none of which skips a line."""

    sampled_share: float  # λ in [0, 1], as the user wrote it: 0.1 is a tenth
    questions: QuestionStream | TypedQuestions
    pairs: QuestionStream
    samples_per_slot: int

    def question(self, ordinal: int) -> int:
        """Index of the question that a sampled slot asks."""
        return self.questions.index(_num_sampled(ordinal, self.sampled_share))

    def pairs_of(self, ordinal: int) -> tuple[int, ...]:
        """Indices of the pairs of a slot, a sample each; empty where it asks a question.

        >>> order = MixedOrder(sampled_share=0.5, questions=QuestionStream(9, seed=0),
        ...                    pairs=QuestionStream(4, seed=1), samples_per_slot=2)
        >>> [order.pairs_of(ordinal) for ordinal in range(4)]
        [(2, 3), (), (0, 1), ()]
        """
        before = _num_sampled(ordinal, self.sampled_share)
        if _num_sampled(ordinal + 1, self.sampled_share) > before:
            return ()
        first = (ordinal - before) * self.samples_per_slot
        return tuple(self.pairs.index(first + i) for i in range(self.samples_per_slot))


class TypedQuestions:
    """The questions of several types, which lie in one table, a type behind the other.

    >>> two = [QuestionStream(number, seed=0) for number in (4, 2)]
    >>> questions = TypedQuestions(two, weights=(2, 1), batch_size=3)
    >>> [questions.index(number) for number in range(6)]
    [1, 5, 0, 2, 4, 3]
    """

    def __init__(
        self,
        streams: Sequence[QuestionStream],
        *,
        weights: Sequence[float],
        batch_size: int,
        sampled_share: float = 1.0,
    ) -> None:
        """`streams` and `weights` (positive) are each type's; `batch_size` in slots."""
        self._streams = tuple(streams)
        self._share = sampled_share
        self._batch_size = batch_size
        exact = [_exact(weight) for weight in weights]
        # Of each type in a batch, on average.
        self._parts = [_exact(sampled_share) * batch_size * each / sum(exact) for each in exact]
        # By batch: slots of each type before it. Grown as it is asked for, always to the same.
        self._before: list[tuple[int, ...]] = [(0,) * len(exact)]

    def index(self, number: int) -> int:
        """Index of the question that the sampled slot `number` asks, of these counted from 0."""
        kind, rank = self._place(number)
        return self._first_of(kind) + self._streams[kind].index(rank)

    def replacement(self, slot: int, *, attempt: int) -> int:
        """Index of another question of the same type, see `QuestionStream.replacement`."""
        kind, _ = self._place(_num_sampled(slot, self._share))
        return self._first_of(kind) + self._streams[kind].replacement(slot, attempt=attempt)

    def _first_of(self, kind: int) -> int:
        return sum(stream.num_questions for stream in self._streams[:kind])

    def _place(self, number: int) -> tuple[int, int]:
        """The type of a sampled slot, and how many slots of that type are before it."""
        ordinal = -(-(number + 1) // _exact(self._share)) - 1
        batch = ordinal // self._batch_size
        while len(self._before) <= batch + 1:
            counts = self._counts(len(self._before) - 1)
            last = self._before[-1]
            self._before.append(tuple(map(sum, zip(last, counts, strict=True))))
        before, after = self._before[batch : batch + 2]
        own = tuple(end - start for start, end in zip(before, after, strict=True))
        kind, rank = _spread(own)[number - sum(before)]
        return kind, before[kind] + rank

    def _counts(self, batch: int) -> list[int]:
        """Slots of each type in the batch that follows those known."""
        first, end = (
            _num_sampled(slot * self._batch_size, self._share) for slot in (batch, batch + 1)
        )
        counts = [int(part) for part in self._parts]
        missing = end - first - sum(counts)
        lags = [
            part * (batch + 1) - before - count
            for part, before, count in zip(self._parts, self._before[batch], counts, strict=True)
        ]
        may_have_more = [kind for kind, part in enumerate(self._parts) if part % 1]
        for kind in sorted(may_have_more, key=lambda kind: -lags[kind])[:missing]:
            counts[kind] += 1
        return counts


@functools.lru_cache(maxsize=64)
def _spread(counts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """So many slots of each type, as evenly as they go: (type, its number among them) by slot.

    >>> _spread((3, 1))
    ((0, 0), (0, 1), (1, 0), (0, 2))
    """
    places = [
        (Fraction(2 * rank + 1, count), kind, rank)
        for kind, count in enumerate(counts)
        for rank in range(count)
    ]
    return tuple((kind, rank) for _, kind, rank in sorted(places))


def _num_sampled(ordinal: int, share: float) -> int:
    """Of the slots before this one."""
    return ordinal * _exact(share) // 1


@functools.lru_cache(maxsize=64)
def _exact(number: float) -> Fraction:
    """Of its decimal digits: in binary 0.7 is a little less than seven tenths."""
    return Fraction(str(number))
