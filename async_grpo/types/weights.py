"""Which weights made a token, and how a full set of them travels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from async_grpo.types.canary import CanaryRow


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

    data: Any  # ObjectRef of a [size_bytes] uint8 array, owned as the bucket's
    size_bytes: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class WeightsBucket:
    """Pieces of parameters as one run of bytes in the object store."""

    pieces: tuple[Piece, ...]  # in the order of the bytes
    data: Any  # ObjectRef of a [size_bytes] uint8 array, owned by the trainer rank that put it
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
