"""What a rank was sent of a gradient step and what it trained: numbers that must be the same."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from async_grpo.types.samples import Sample

DIGESTS = 1 << 64

RowKey = tuple[int, int, int, int]  # of a sequence: ordinal, attempt, index in its group, row


class Tally(NamedTuple):
    """Sums over the samples of one gradient step on one rank, in whatever order they came."""

    num_samples: int = 0
    num_tokens: int = 0  # unmasked ones
    digest: int = 0  # which samples they are
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
    """Count samples that a rank is about to be sent."""
    keys, num_samples, num_tokens, weight = [], 0, 0, 0.0
    for part in (part for sample in samples for part in sample.parts()):
        keys.append(part.key)
        num_here = part.num_trained_tokens - part.num_trained_elsewhere
        num_samples += part.row == 0  # a sample is counted where its first row is trained
        num_tokens += num_here
        weight += num_here * token_weight(part.num_trained_tokens, aggregation, constant_length)
    return Tally(num_samples, num_tokens, digest_of(keys, incarnation=incarnation), weight)


def token_weight(num_trained: int, aggregation: str, constant_length: int) -> float:
    """w_i of the design's table, for a sample of `num_trained` unmasked tokens.

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
    """Return the sum, modulo 2^64, of a hash of each key in its run.

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
