"""Publishes the policy's weights through Ray's object store, to every worker.

All ranks collect: each stores its share of the buckets, rank 0 learns of all of them. Rank 0 gives
the controller the snapshot, which any worker can fetch, at once or when it joins later.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from async_grpo.types import (
    Stored,
    WeightsBucket,
    WeightsDelta,
    WeightsSnapshot,
    WeightsVersion,
)
from async_grpo.util import deadlines
from async_grpo.util.add_ons import add_on
from async_grpo.util.errors import DeadlineError, WeightSyncError
from async_grpo.weight_sync.buckets import (
    BUCKET_BYTES,
    NamedTensors,
    bytes_of,
    checksum_of,
    dtype_name,
    lay_out,
    owner_of,
    pack,
    unpack,
)
from async_grpo.weight_sync.gather import Gather, GatherPlan, Received, Shards, is_finite

if TYPE_CHECKING:
    from async_grpo.cluster.cluster import Cluster, Exported

LEAST_GAIN = 2  # what changed is sent alone where all of it is so many times as much
Roles = tuple[str, ...]


class Collector:
    """Every rank has one; `collect` is called on all of them, in the same order.

    consumes:     the shards of all ranks, between two gradient steps
    produces:     buckets in the object store, each put by the rank that owns it; on rank 0 the
                  snapshot
    waits for:    the other ranks' parts of a bucket, and memory for it
    unblocked by: the collective; the thread that checks, hashes and stores

    The ranks stand still while their rows leave the parameters. What becomes of a bucket then is
    the work of a thread. Whatever goes wrong on one rank is raised on all of them.
    """

    def __init__(
        self,
        shards: Shards,
        cluster: Cluster,
        *,
        device: torch.device,
        dtype: torch.dtype,
        bucket_bytes: int = BUCKET_BYTES,
        with_deltas: bool = False,
    ) -> None:
        """Collective. `with_deltas`: keep this rank's bytes, to send what changes next as well."""
        self._cluster = cluster
        described = ((name, dtype_name(dtype), shape) for name, shape in shards.shapes)
        self._plan = GatherPlan(tuple(lay_out(described)), shards.num_ranks, bucket_bytes)
        self._gather = Gather(self._plan, shards, device=device)
        self._gives = shards.is_first_replica
        # The thread's own: collectives of the training loop must not meet its.
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        timeout = timedelta(seconds=deadlines.WEIGHTS_COLLECTED_S)
        self._group = None if self._alone else dist.new_group(backend="gloo", timeout=timeout)
        self._is_main = self._alone or dist.get_rank() == 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-weights")
        self._with_deltas = with_deltas
        self._kept: dict[int, NDArray[np.uint8]] = {}  # this rank's bytes of `_since`, by bucket
        self._since: WeightsVersion | None = None
        self._count = 0  # of collections
        self._own: dict[int, list[Stored]] = {}  # references of this rank, by collection
        self._live: WeakValueDictionary[int, WeightsBucket] = WeakValueDictionary()  # on rank 0

    def collect(self, shards: list[Tensor], *, version: WeightsVersion) -> Collected:
        """Take the weights out of this rank's flat `shards`, which may change on return."""
        self._count = count = self._count + 1
        self._thread.submit(self._let_go)
        stored = []
        if self._gives:
            for received in self._gather.rounds(shards):
                stored.append(self._thread.submit(self._store, received, count, version))
        return Collected(self._thread.submit(self._join, stored, count, version))

    def close(self) -> None:
        """Store no more; what runs is left to its deadline."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # In the thread

    def _let_go(self) -> None:
        """Let the store free what rank 0 no longer has, before it takes more."""
        live = [sorted(self._live)]
        if not self._alone:
            dist.broadcast_object_list(live, src=0, group=self._group)
        self._own = {count: own for count, own in self._own.items() if count in live[0]}

    def _store(self, received: Received, count: int, version: WeightsVersion) -> _Stored:
        try:
            if not received.is_finite():
                raise WeightSyncError(self._complaint(received, version))
            data = bytes_of(received.data)
            delta = self._changed(received.bucket, data) if self._with_deltas else None
            return _Stored(
                received.bucket,
                self._put(data, count),
                data.nbytes,
                checksum_of(data),
                (self._put(delta, count), delta.nbytes) if delta is not None else None,
            )
        finally:
            self._gather.free(received)

    def _put(self, data: NDArray[np.uint8], count: int) -> Exported:
        reference = self._cluster.put_bytes(data)
        self._own.setdefault(count, []).append(reference)
        return self._cluster.export_reference(reference)

    def _changed(self, bucket: int, data: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """What has changed in a bucket since the last collection, where that is less to send."""
        if bucket not in self._kept:
            self._kept[bucket] = data.copy()
            return None
        delta: NDArray[np.uint8] | None = add_on("weight_delta").encode(
            data, self._kept[bucket], item_bytes=self._plan.item_bytes
        )
        np.copyto(self._kept[bucket], data)
        return delta if delta is not None and delta.nbytes * LEAST_GAIN <= data.nbytes else None

    def _complaint(self, received: Received, version: WeightsVersion) -> str:
        at = 0
        name = "?"
        for piece in self._plan.pieces(received.bucket):
            count = piece.size_bytes // self._plan.item_bytes
            if not is_finite(received.data[at : at + count]):
                tensors = self._plan.tensors
                name = tensors[owner_of(tensors, piece.offset_bytes)].name
                break
            at += count
        return not_finite(name, version)

    def _join(
        self, stored: list[Future[_Stored]], count: int, version: WeightsVersion
    ) -> WeightsSnapshot | None:
        errors = [error for future in stored if (error := future.exception())]
        share = _Share([] if errors else [future.result() for future in stored], "")
        if errors:
            error = errors[0]
            own = isinstance(error, WeightSyncError)
            share = _Share([], str(error) if own else repr(error))
        since, self._since = self._since, version
        shares = [share]
        if not self._alone:
            shares *= dist.get_world_size()
            dist.all_gather_object(shares, share, group=self._group)
        if reason := next((each.error for each in shares if each.error), ""):
            self._own.pop(count, None)
            raise WeightSyncError(reason) from (errors[0] if errors else None)
        if not self._is_main:
            return None
        snapshot = self._snapshot(shares, count, version)
        return replace(snapshot, is_base=self._with_deltas, delta_since=since)

    def _snapshot(
        self, shares: list[_Share], count: int, version: WeightsVersion
    ) -> WeightsSnapshot:
        every = sorted(stored for share in shares for stored in share.stored)
        imported = self._cluster.import_reference
        buckets = tuple(
            WeightsBucket(
                self._plan.pieces(bucket),
                imported(exported),
                size_bytes,
                checksum,
                WeightsDelta(imported(delta[0]), delta[1]) if delta else None,
            )
            for bucket, exported, size_bytes, checksum, delta in every
            if size_bytes
        )
        if buckets:
            self._live[count] = buckets[0]
        return WeightsSnapshot(version, buckets, tensors=self._plan.tensors)


class Collected:
    """What becomes of a collection, on every rank."""

    def __init__(self, outcome: Future[WeightsSnapshot | None]) -> None:
        self._outcome = outcome

    def wait(self) -> WeightsSnapshot | None:
        """Until all ranks have stored their share; the snapshot on rank 0, None elsewhere.

        Raises, on every rank:
            WeightSyncError: a parameter is not finite, or a rank could not store its buckets.
            DeadlineError: the object store, or another rank, takes too long.
        """
        try:
            return self._outcome.result(deadlines.WEIGHTS_COLLECTED_S)
        except TimeoutError:
            raise DeadlineError(
                "new weights were not in the object store within "
                f"{deadlines.WEIGHTS_COLLECTED_S:g} s: look at the load of the trainer's machines"
            ) from None


class _Share(NamedTuple):
    """What one rank has stored, or why it has not."""

    stored: list[_Stored]
    error: str


class _Stored(NamedTuple):
    """A bucket in the object store, as its rank tells the others of it."""

    bucket: int
    reference: Exported
    size_bytes: int
    checksum: int
    delta: tuple[Exported, int] | None  # its reference and size


class Publisher:
    """Puts whole parameters into the object store, and reads what lies there."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        dtype: torch.dtype = torch.float32,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.dtype = dtype
        self._cluster = cluster
        self._bucket_bytes = bucket_bytes

    def pack(self, named_tensors: NamedTensors, *, version: WeightsVersion) -> WeightsSnapshot:
        """Put whole tensors that this process has into the object store.

        Raises:
            WeightSyncError: a parameter is not finite; nothing is published.
        """
        checked = _checked(named_tensors, dtype=self.dtype, version=version)
        return pack(
            checked, put=self._cluster.put_bytes, version=version, bucket_bytes=self._bucket_bytes
        )

    def read(self, snapshot: WeightsSnapshot) -> Iterator[tuple[str, Tensor]]:
        """The parameters of a snapshot, verified.

        Raises `WeightSyncError` when bytes are not those that were gathered.
        """
        wait, timeout_s = self._cluster.wait, deadlines.BUCKET_HERE_S
        data = (
            wait(bucket.data, timeout_s=timeout_s, who="the object store")
            for bucket in snapshot.buckets
        )
        return unpack(snapshot, data)


def _checked(
    named_tensors: NamedTensors, *, dtype: torch.dtype, version: WeightsVersion
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named_tensors:
        sent = tensor.detach().to(dtype)
        if not is_finite(sent):
            raise WeightSyncError(not_finite(name, version))
        yield name, sent


def not_finite(name: str, version: WeightsVersion) -> str:
    """What is said of weights that must not be published."""
    return (
        f"weights must be finite to be published, {name!r} of version {version} is not: "
        "training has diverged, lower --learning-rate or --max-grad-norm"
    )
