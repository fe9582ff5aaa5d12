"""Versions of the weights, and how a full set of them travels to workers.

The canary, a few fixed rows of tokens, travels along: a worker shows by its scores of them that it
serves these weights (`weight_sync.sync_report` compares).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_ROWS = 4  # in the canary
MAX_ROW_TOKENS = 64
GIB = 2**30
NUM_SNAPSHOTS = 2  # in the object store at a time: one is served while the next is stored
Experts = NDArray[np.integer[Any]]  # indices of chosen experts
Stored = Awaitable[NDArray[np.uint8]]  # an ObjectRef of bytes


class WeightsVersion(NamedTuple):
    """The weights of a run after so many completed batches."""

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
    """One parameter, and its offset when all parameters lie end to end."""

    name: str
    dtype: str  # as torch names it: "float32", "bfloat16"
    shape: tuple[int, ...]
    offset_bytes: int


class Piece(NamedTuple):
    """Some bytes of one parameter, by their offset when all parameters lie end to end."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class WeightsDelta:
    """Turns a bucket of the version `WeightsSnapshot.delta_since` into this version's bucket."""

    data: Stored  # [size_bytes], owned by the trainer rank that put it
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class WeightsBucket:
    """Pieces of parameters as one run of bytes in the object store."""

    pieces: tuple[Piece, ...]  # in the order of the bytes
    data: Stored  # [size_bytes], owned by the trainer rank that put it
    size_bytes: int
    checksum: int  # xxh3_64 of the bytes
    delta: WeightsDelta | None = None  # None: workers load the whole bucket


class WeightSample(NamedTuple):
    """Some numbers of one tensor, an adapter's B times its scaling."""

    name: str  # of the tensor, as in `tensors`
    rows: NDArray[np.int64]  # [K]
    columns: NDArray[np.int64]  # [M]; of a vector empty
    values: NDArray[np.float32]  # [K, M], or [K]


@dataclass(frozen=True, slots=True, eq=False)
class WeightsSnapshot:
    """A full set of weights that any worker can load, now or when it joins later."""

    version: WeightsVersion
    buckets: tuple[WeightsBucket, ...]
    canary: tuple[CanaryRow, ...] = ()  # scored by the trainer with exactly these weights
    unchanged_since: WeightsVersion | None = None  # that version had the same weights
    tensors: tuple[TensorMeta, ...] = ()  # in the model's order
    is_base: bool = False  # workers keep these bytes: a later snapshot may bring deltas to them
    delta_since: WeightsVersion | None = None  # the version whose bytes the deltas change
    # peft's adapter_config.json: `tensors` are an adapter's, named as in its file; "": the model's.
    adapter: str = ""
    # Parameters that are not among `tensors` are those of the worker's model folder.
    rest_of_folder: bool = False
    samples: tuple[WeightSample, ...] = ()  # some numbers, as the trainer computes with them
    # The norm of what rounding took of an adapter's change, by that of the change; None: unknown.
    merge_loss: float | None = None

    @property
    def size_bytes(self) -> int:
        return sum(bucket.size_bytes for bucket in self.buckets)

    @property
    def is_of_folder(self) -> bool:
        """Whether these are the weights of the model folder, which every worker has read."""
        return not self.buckets and not self.tensors

    def renamed(self, version: WeightsVersion) -> WeightsSnapshot:
        """The same weights under a later version: every step in between was skipped."""
        return replace(self, version=version, unchanged_since=self.unchanged_since or self.version)

    def equals(self, served: WeightsVersion) -> bool:
        """Whether an earlier version `served` is known to have the same weights.

        >>> snapshot = WeightsSnapshot(WeightsVersion(0, 2), ()).renamed(WeightsVersion(0, 4))
        >>> [snapshot.equals(WeightsVersion(0, batches)) for batches in (1, 2, 3)]
        [False, True, True]
        """
        return self.unchanged_since is not None and self.unchanged_since <= served


@dataclass(frozen=True, slots=True, eq=False)
class WeightsAck:
    """A worker's acknowledgement that it serves `version`, and the cost of the change."""

    worker_id: str
    version: WeightsVersion
    seconds: float  # receiving, verifying and loading
    pause_seconds: float  # in which generation was paused
    recomputed_tokens: int = 0  # of running requests whose KV cache was dropped
    kept_tokens: int = 0  # of running requests whose KV cache was kept
    dtype: str = "float32"  # of the worker's model
    transport: str = "object_store"  # how the weights came
    canary: tuple[NDArray[np.float32], ...] = ()  # log-probabilities of the snapshot's rows
    canary_problem: str = ""  # what could not be checked, and why
    # The experts that it chose for the rows, as `CanaryRow.experts`; empty: unknown.
    canary_experts: tuple[Experts, ...] = ()
    received_bytes: int = 0  # out of the object store; 0: not counted


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Which workers serve a snapshot, and which were fenced because they could not."""

    version: WeightsVersion
    acks: tuple[WeightsAck, ...]
    failures: Mapping[str, str]  # worker id -> reason
    late: tuple[str, ...] = ()  # ids of workers that are still loading, and serve no request yet


@dataclass(frozen=True, slots=True, eq=False)
class CanaryRow:
    """One row of the canary, with the trainer's log-probabilities at temperature 1."""

    token_ids: NDArray[np.int32]  # [n], n >= 2
    logprobs: NDArray[np.float32]  # [n - 1], of token_ids[1:]
    dtype: str = "float32"  # that the trainer computed in
    # {layer: [n - 1, chosen]} experts that the trainer chose; empty: of a dense model.
    experts: Mapping[int, Experts] = field(default_factory=dict)


def canary_tokens(prompts: Iterable[NDArray[np.int32]]) -> tuple[NDArray[np.int32], ...]:
    """The canary of a run: its first prompts of at least 2 tokens, each cut to `MAX_ROW_TOKENS`.

    >>> rows = canary_tokens(np.arange(n, dtype=np.int32) for n in (1, 100, 3, 2, 0, 9, 9))
    >>> [len(row) for row in rows]
    [64, 3, 2, 9]
    """
    rows = (prompt[:MAX_ROW_TOKENS] for prompt in prompts if len(prompt) >= 2)
    return tuple(islice(rows, NUM_ROWS))


def store_complaint(model_bytes: int, *, store_bytes: int, share: float) -> str:
    """What is wrong with a node's object store for a share of the weights; "": nothing.

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
    """The share (0 to 1) of new weights that rank 0's machine stores.

    `num_here`: how many of the `num_ranks` ranks run on that machine. `shard_ranks`: how many
    ranks, from 0 on, hold the first copy of the model; 0: all; None: the ranks of one machine; 1:
    each holds one, and stores its own rows.

    >>> stored_here(num_ranks=16, num_here=8, shard_ranks=0)
    0.5
    >>> stored_here(num_ranks=16, num_here=8, shard_ranks=None)
    1.0
    >>> stored_here(num_ranks=16, num_here=4, shard_ranks=8)
    0.5
    >>> stored_here(num_ranks=16, num_here=4, shard_ranks=1)
    0.25
    """
    sharing = num_here if shard_ranks is None else shard_ranks
    storing = sharing if sharing > 1 else num_ranks
    return min(num_here, storing) / storing
