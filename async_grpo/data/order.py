"""The order of training: which question or which given pairs each slot of a batch has.

Questions of one type come in an endless seeded permutation with random access by ordinal. It
depends on the seed and the number of questions alone (in the order `window` also on how many lines
each window has), not on ranks, workers or earlier reads, so a resumed run continues it from an
ordinal. All randomness is hashed or counter-based and the same on every machine and numpy version.

Slot o asks a question where floor((o + 1) λ) > floor(o λ), with λ the share of sampled slots (a
Beatty sequence); the others have given pairs. No sequence is more even: any n consecutive slots
hold n λ sampled ones, to less than one slot.

In every batch of B slots a type with the share p of the questions has floor(p λ B) or ceil(p λ B):
each type gets its floor, and the types that lag most behind their share get one more. All of it
depends on the ordinal alone.
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
        """Index of the question at `ordinal`."""
        epoch, position = divmod(ordinal, self.num_questions)
        return int(_permutation(self.num_questions, self.purpose, self.seed, epoch)[position])

    def replacement(self, slot: int, *, attempt: int, ordinal: int = 0) -> int:
        """Index of the question at the `attempt`-th replacement (from 1) of a slot of the run.

        Replacements are a stream of their own: replacing a question moves no other. `ordinal` is
        that of the slot's question in this stream.
        """
        return _hash("replacement", self.seed, slot, attempt) % self.num_questions


@functools.lru_cache(maxsize=32)  # a batch may straddle two epochs of each type, and of pairs
def _permutation(number: int, purpose: str, *seeds: int) -> NDArray[np.int64]:
    # Raw words are sorted, because numpy guarantees stable numbers for bit generators alone.
    words = np.random.Philox(key=_hash(purpose, *seeds)).random_raw(number)
    return np.argsort(words, kind="stable")


@dataclass(frozen=True, slots=True, eq=False)
class WindowStream:
    """As `QuestionStream`, over windows of consecutive lines: few of them are read at a time.

    In each epoch the windows come in a seeded order, and the lines of each in a seeded order of
    their own.
    """

    sizes: tuple[int, ...]  # lines of each window, in the order of their indices
    _: KW_ONLY
    seed: int

    @property
    def num_questions(self) -> int:
        """Lines of all windows."""
        return int(_bounds(self)[-1])

    def index(self, ordinal: int) -> int:
        """Index of the line at `ordinal`."""
        epoch, position = divmod(ordinal, self.num_questions)
        order, begins = _order_of_windows(self, epoch)
        turn = int(np.searchsorted(begins, position, side="right")) - 1
        window = int(order[turn])
        own = _permutation(self.sizes[window], "window", self.seed, epoch, window)
        return int(_bounds(self)[window] + own[position - begins[turn]])

    def replacement(self, slot: int, *, attempt: int, ordinal: int) -> int:
        """As `QuestionStream.replacement`, out of the window that holds the line at `ordinal`."""
        bounds = _bounds(self)
        window = int(np.searchsorted(bounds, self.index(ordinal), side="right")) - 1
        drawn = _hash("replacement", self.seed, slot, attempt) % self.sizes[window]
        return int(bounds[window]) + drawn


@functools.lru_cache(maxsize=32)
def _bounds(stream: WindowStream) -> NDArray[np.int64]:
    """[W + 1] index of the first line of each window, and of the end."""
    return np.cumsum((0, *stream.sizes))


@functools.lru_cache(maxsize=32)
def _order_of_windows(
    stream: WindowStream, epoch: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """([W] the windows of an epoch in order, [W] positions at which they begin)."""
    order = _permutation(len(stream.sizes), "windows", stream.seed, epoch)
    return order, np.cumsum((0, *(stream.sizes[window] for window in order[:-1])))


def sampling_seed(run_seed: int, *, ordinal: int, attempt: int) -> int:
    """A seed for the engine's samples of one question, in [0, 2**63): it fits a signed int64."""
    return _hash("sampling", run_seed, ordinal, attempt) >> 1


def _hash(purpose: str, *numbers: int) -> int:
    """64 bits that depend on all of `numbers`, and differ between purposes."""
    # Wrapped, so that seeds may be negative.
    words = struct.pack(f"<{len(numbers)}Q", *(number % 2**64 for number in numbers))
    digest = hashlib.blake2b(words, digest_size=8, person=purpose.encode())
    return int.from_bytes(digest.digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedOrder:
    """Questions and given pairs by slot, each with epochs of their own that skip no line."""

    sampled_share: float  # λ in [0, 1], as the user wrote it: 0.1 is a tenth
    questions: QuestionStream | WindowStream | TypedQuestions
    pairs: QuestionStream
    samples_per_slot: int

    def question(self, ordinal: int) -> int:
        """Index of the question that the sampled slot `ordinal` asks."""
        return self.questions.index(_num_sampled(ordinal, self.sampled_share))

    def replacement(self, slot: int, *, attempt: int) -> int:
        """Index of the question at the `attempt`-th replacement (from 1) of a sampled slot."""
        number = _num_sampled(slot, self.sampled_share)
        return self.questions.replacement(slot, attempt=attempt, ordinal=number)

    def pairs_of(self, ordinal: int) -> tuple[int, ...]:
        """Indices of a slot's given pairs, one for each sample; empty where it asks a question.

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
    """The questions of several types, which one table holds type after type.

    >>> two = [QuestionStream(number, seed=0) for number in (4, 2)]
    >>> questions = TypedQuestions(two, weights=(2, 1), batch_size=3)
    >>> [questions.index(number) for number in range(6)]
    [1, 5, 0, 2, 4, 3]
    """

    def __init__(
        self,
        streams: Sequence[QuestionStream | WindowStream],
        *,
        weights: Sequence[float],
        batch_size: int,
        sampled_share: float = 1.0,
    ) -> None:
        """`streams` and `weights` (positive): one for each type; `batch_size` in slots."""
        self._streams = tuple(streams)
        self._share = sampled_share
        self._batch_size = batch_size
        exact = [_exact(weight) for weight in weights]
        # Mean slots of each type in a batch.
        self._parts = [_exact(sampled_share) * batch_size * each / sum(exact) for each in exact]
        # [batch][type]: slots of the type before the batch. A cache that grows on demand.
        self._before: list[tuple[int, ...]] = [(0,) * len(exact)]

    def index(self, number: int) -> int:
        """Index of the question of the sampled slot `number`; sampled slots count from 0."""
        kind, rank = self._place(number)
        return self._first_of(kind) + self._streams[kind].index(rank)

    def replacement(self, slot: int, *, attempt: int, ordinal: int) -> int:
        """Index of another question of the same type: see `QuestionStream.replacement`."""
        kind, rank = self._place(ordinal)
        stream = self._streams[kind]
        return self._first_of(kind) + stream.replacement(slot, attempt=attempt, ordinal=rank)

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
        """Slots of each type in `batch`; `_before` must reach up to it."""
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
    """`counts` slots of each type, spread evenly: (type, number within the type) by slot.

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
    """How many of the slots before `ordinal` are sampled."""
    return ordinal * _exact(share) // 1


@functools.lru_cache(maxsize=64)
def _exact(number: float) -> Fraction:
    """The fraction of the decimal digits: in binary 0.7 is a little less than seven tenths."""
    return Fraction(str(number))
