"""Which weights made a token, how a full set of them travels, and by what a worker shows that it
serves them.

That is the canary: fixed tokens that engine and trainer score with the same weights, right after
each update. What they disagree by is numerical mismatch alone: no staleness, no sampling.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_ROWS = 4  # of the canary
MAX_ROW_TOKENS = 64
GIB = 2**30
NUM_SNAPSHOTS = 2  # in the object store at a time: one is served while the next is stored
Stored = Awaitable[NDArray[np.uint8]]  # an ObjectRef of bytes


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


class TensorMeta(NamedTuple):
    """Where one parameter lies when all of them are laid end to end."""

    name: str
    dtype: str  # as torch names it: "float32", "bfloat16"
    shape: tuple[int, ...]
    offset_bytes: int


class Piece(NamedTuple):
    """Some bytes of one parameter: where they lie when all parameters are laid end to end."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class WeightsDelta:
    """What turns a bucket of `WeightsSnapshot.delta_since` into this version's."""

    data: Stored  # [size_bytes], owned as the bucket's
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class WeightsBucket:
    """Pieces of parameters as one run of bytes in the object store."""

    pieces: tuple[Piece, ...]  # in the order of the bytes
    data: Stored  # [size_bytes], owned by the trainer rank that put it
    size_bytes: int
    checksum: int  # xxh3_64 of the bytes
    delta: WeightsDelta | None = None  # None: too much has changed


@dataclass(frozen=True, slots=True, eq=False)
class WeightsSnapshot:
    """A full set of weights that any worker can load, now or when it joins later."""

    version: WeightsVersion
    buckets: tuple[WeightsBucket, ...]
    canary: tuple[CanaryRow, ...] = ()  # scored by the trainer with exactly these weights
    unchanged_since: WeightsVersion | None = None  # that version had the same weights
    tensors: tuple[TensorMeta, ...] = ()  # in the model's order
    is_base: bool = False  # what changes next may be sent alone: keep these bytes
    delta_since: WeightsVersion | None = None  # the version whose bytes the deltas change

    @property
    def size_bytes(self) -> int:
        return sum(bucket.size_bytes for bucket in self.buckets)

    @property
    def is_of_folder(self) -> bool:
        """Whether it brings nothing: these are what every worker has read from its folder."""
        return not self.buckets and not self.tensors

    def renamed(self, version: WeightsVersion) -> WeightsSnapshot:
        """The same weights under a later version: every step in between was skipped."""
        return replace(self, version=version, unchanged_since=self.unchanged_since or self.version)

    def equals(self, served: WeightsVersion) -> bool:
        """Whether an earlier version, `served`, is known to have the same weights.

        >>> snapshot = WeightsSnapshot(WeightsVersion(0, 2), ()).renamed(WeightsVersion(0, 4))
        >>> [snapshot.equals(WeightsVersion(0, batches)) for batches in (1, 2, 3)]
        [False, True, True]
        """
        return self.unchanged_since is not None and self.unchanged_since <= served


@dataclass(frozen=True, slots=True, eq=False)
class WeightsAck:
    """A worker serves `version`; what the change cost it."""

    worker_id: str
    version: WeightsVersion
    seconds: float  # receiving, verifying and loading
    pause_seconds: float  # generation stood still
    recomputed_tokens: int = 0  # of running requests, whose KV cache was thrown away
    kept_tokens: int = 0  # of running requests, whose KV cache was not
    dtype: str = "float32"  # of the worker's model
    transport: str = "object_store"  # how the weights came
    canary: tuple[NDArray[np.float32], ...] = ()  # log-probabilities of the snapshot's rows
    canary_problem: str = ""  # what could not be checked, and why
    received_bytes: int = 0  # out of the object store; 0: nobody counted


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Who serves a snapshot, and who was fenced because it could not."""

    version: WeightsVersion
    acks: tuple[WeightsAck, ...]
    failures: Mapping[str, str]  # worker id -> reason
    late: tuple[str, ...] = ()  # worker ids: they still load, and serve nobody until they have


class Bound(NamedTuple):
    """Nats that rounding explains: of any token, and of the mean over all."""

    largest: float
    mean: float


# Log-probabilities of float32 were seen to differ by 1e-6 in the mean (4 layers), and by less than
# 1e-4 at most in deep models, while an update at a learning rate of 1e-6 moves them by 2e-5 to 2e-4
# in the mean. Of bfloat16 they differ by 0.02 in the mean and 0.2 at most, missed update or not:
# there `readback` tells what was missed, and the canary what is computed otherwise.
BOUNDS = {"float64": Bound(1e-3, 1e-5), "float32": Bound(1e-3, 1e-5)}
LOW_PRECISION_BOUND = Bound(0.7, 0.05)
# A policy that guesses among all words of any vocabulary does better on its own prompts. One whose
# mean is below has logits so large that rounding alone moves log-probabilities by nats.
COLLAPSED_NATS = -20.0


@dataclass(frozen=True, slots=True, eq=False)
class CanaryRow:
    """One row of tokens, and the trainer's log-probabilities of them at temperature 1."""

    token_ids: NDArray[np.int32]  # [n], n >= 2
    logprobs: NDArray[np.float32]  # [n - 1], of token_ids[1:]
    dtype: str = "float32"  # that the trainer computed in


def canary_tokens(prompts: Iterable[NDArray[np.int32]]) -> tuple[NDArray[np.int32], ...]:
    """The rows of a run: its first prompts, cut; a row needs a token that another one predicts.

    >>> rows = canary_tokens(np.arange(n, dtype=np.int32) for n in (1, 100, 3, 2, 0, 9, 9))
    >>> [len(row) for row in rows]
    [64, 3, 2, 9]
    """
    rows = (prompt[:MAX_ROW_TOKENS] for prompt in prompts if len(prompt) >= 2)
    return tuple(islice(rows, NUM_ROWS))


def canary_differences(
    rows: Sequence[CanaryRow], found: Sequence[NDArray[np.float32]]
) -> NDArray[np.float64]:
    """|engine - trainer| of every token of `rows`, [K] nats; infinite where one is not finite."""
    with np.errstate(invalid="ignore"):
        parts = [
            np.abs(row.logprobs.astype(np.float64) - logprobs)
            for row, logprobs in zip(rows, found, strict=True)
        ]
    differences = np.concatenate(parts) if parts else np.zeros(0)
    return np.where(np.isfinite(differences), differences, np.inf)


def canary_complaint(
    rows: Sequence[CanaryRow], found: Sequence[NDArray[np.float32]], *, dtype: str
) -> str:
    """What to tell the user of an engine of `dtype` that scored `rows`; empty when all is well."""
    differences = canary_differences(rows, found)
    bound = canary_bound(dtype, *(row.dtype for row in rows))
    if not differences.size or (
        differences.max() <= bound.largest and differences.mean() <= bound.mean
    ):
        return ""
    fact = (
        f"log-probabilities of {len(differences)} fixed tokens differ from the trainer's by up to "
        f"{differences.max():.3g} nats (mean {differences.mean():.3g}) with the same weights"
    )
    mean = float(np.concatenate([row.logprobs for row in rows]).mean())
    if mean < COLLAPSED_NATS:
        return (
            f"{fact}, which says nothing of the worker: to the trainer itself they have {mean:.3g} "
            "nats a token, worse than guessing: the policy has collapsed; lower --learning-rate "
            "and start again from an earlier checkpoint"
        )
    return (
        f"{fact}, where rounding explains {bound.largest:g} (mean {bound.mean:g}): it does "
        "not serve what was sent, or computes it differently; give worker and "
        "trainer the same model folder and --dtype, or restart it"
    )


def canary_bound(*dtypes: str) -> Bound:
    """What rounding explains when engine and trainer compute in these types.

    >>> canary_bound("float32", "float32")
    Bound(largest=0.001, mean=1e-05)
    >>> canary_bound("float32", "bfloat16")
    Bound(largest=0.7, mean=0.05)
    """
    return max(BOUNDS.get(dtype, LOW_PRECISION_BOUND) for dtype in dtypes)


def store_complaint(model_bytes: int, *, store_bytes: int, share: float) -> str:
    """What is wrong with a node's object store that must hold a share of two snapshots, or "".

    >>> store_complaint(10 * GIB, store_bytes=20 * GIB, share=1.0)
    ''
    >>> print(store_complaint(10 * GIB, store_bytes=5 * GIB, share=0.5))
    this node's object store has 5.0 GiB and must hold 50% of 2 snapshots of 10.0 GiB of weights: \
they would go to a disk and back; start Ray with --object-store-memory 10737418240 or more, and a \
container with --shm-size 11g or more
    """
    needed = math.ceil(NUM_SNAPSHOTS * model_bytes * share)
    if needed <= store_bytes:
        return ""
    part = f"{share:.0%} of " if share < 1 else ""
    return (
        f"this node's object store has {store_bytes / GIB:.1f} GiB and must hold {part}"
        f"{NUM_SNAPSHOTS} snapshots of {model_bytes / GIB:.1f} GiB of weights: they would go to a "
        f"disk and back; start Ray with --object-store-memory {needed} or more, and a container "
        f"with --shm-size {math.ceil(needed * 1.05 / GIB)}g or more"
    )


def stored_here(*, num_ranks: int, num_here: int, shard_ranks: int | None) -> float:
    """The share of new weights that rank 0's machine stores, with so many of all ranks.

    `shard_ranks` of them hold a copy of the model together; 0: all; None: those of a machine. Of
    several copies the first is stored, which ranks from 0 on hold.

    >>> stored_here(num_ranks=16, num_here=8, shard_ranks=0)
    0.5
    >>> stored_here(num_ranks=16, num_here=8, shard_ranks=None)
    1.0
    >>> stored_here(num_ranks=16, num_here=4, shard_ranks=8)
    0.5
    """
    storing = num_here if shard_ranks is None else shard_ranks or num_ranks
    return min(num_here, storing) / storing
