"""The order of the questions: an endless seeded permutation that is read at any ordinal.

It depends on the seed and the number of questions alone, not on ranks, workers or on what was read
before, so a resumed run continues it from an ordinal. All randomness is hashed or counter-based
and the same on every machine and numpy version.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

CACHED_EPOCHS = 2  # a batch may straddle two


class QuestionStream:
    """Indices into `num_questions` questions by ordinal 0, 1, 2 ..., each epoch a permutation."""

    __slots__ = ("_epochs", "_num_questions", "_seed")

    def __init__(self, num_questions: int, *, seed: int) -> None:
        if num_questions < 1:
            raise ValueError(f"num_questions must be positive, got {num_questions}")
        self._num_questions = num_questions
        self._seed = seed
        self._epochs: dict[int, NDArray[np.int64]] = {}

    def index(self, ordinal: int) -> int:
        """The question at `ordinal`, at random access."""
        epoch, position = divmod(ordinal, self._num_questions)
        return int(self._permutation(epoch)[position])

    def replacement(self, slot: int, *, attempt: int) -> int:
        """The question drawn for ordinal `slot` at its `attempt`-th replacement (from 1).

        Its own stream: replacing a question moves no other.
        """
        return _hash("replacement", self._seed, slot, attempt) % self._num_questions

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._epochs:
            while len(self._epochs) >= CACHED_EPOCHS:
                self._epochs.pop(next(iter(self._epochs)))
            # Sorting raw words, because only bit generators promise the same numbers for ever.
            words = np.random.Philox(key=_hash("epoch", self._seed, epoch)).random_raw(
                self._num_questions
            )
            self._epochs[epoch] = np.argsort(words, kind="stable")
        return self._epochs[epoch]


def sampling_seed(run_seed: int, *, ordinal: int, attempt: int) -> int:
    """A seed for the engine's samples of one question, in [0, 2**63): it fits a signed int64."""
    return _hash("sampling", run_seed, ordinal, attempt) >> 1


def _hash(purpose: str, *numbers: int) -> int:
    """64 bits that depend on all of `numbers`, and differ between purposes."""
    # Wrapped, so that negative seeds are seeds too.
    words = struct.pack(f"<{len(numbers)}Q", *(number % 2**64 for number in numbers))
    digest = hashlib.blake2b(words, digest_size=8, person=purpose.encode())
    return int.from_bytes(digest.digest(), "little")
