"""The order of the questions: an endless seeded permutation that is read at any ordinal.

It depends on the seed and the number of questions alone, not on ranks, workers or on what was read
before, so a resumed run continues it from an ordinal. All randomness is hashed or counter-based
and the same on every machine and numpy version.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from dataclasses import KW_ONLY, dataclass

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
