"""Publishes the policy's weights through Ray's object store, to every worker.

All ranks collect: each stores its share of the buckets and sends rank 0 the references. Rank 0
hands the snapshot to the controller; any worker can fetch it, now or when it joins later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from async_grpo.types import Stored, WeightsBucket, WeightsDelta, WeightsSnapshot, WeightsVersion
from async_grpo.util import deadlines
from async_grpo.util.add_ons import add_on
from async_grpo.util.errors import DeadlineError, WeightSyncError
from async_grpo.weight_sync import buckets
from async_grpo.weight_sync.gather import Gather, GatherPlan, Received, Shards, is_finite

if TYPE_CHECKING:
    from async_grpo.cluster.cluster import Cluster, Exported

NUM_STORE_THREADS = 2  # one copies into the object store while the other checks and hashes
LEAST_GAIN = 2  # a delta is sent where the bucket is at least so many times as large


class Collector:
    """Gathers the weights of all ranks. Every rank has one; all call `collect` in the same order.

    consumes:     this rank's shards, between two gradient steps
    produces:     buckets in the object store, each put by the rank that holds its rows; on rank 0
                  the snapshot
    waits for:    memory for a bucket
    unblocked by: the threads that check, hash and store

    Training pauses while rows are copied out of the parameters; threads then check and store the
    buckets. An error of one rank is raised on all of them.
    """

    def __init__(
        self,
        shards: Shards,
        cluster: Cluster,
        *,
        device: torch.device,
        dtype: torch.dtype,
        bucket_bytes: int = buckets.BUCKET_BYTES,
        with_deltas: bool = False,
        rest_of_folder: bool = False,
    ) -> None:
        """Collective. `with_deltas`: keep this rank's bytes, so that later changes can be sent.

        `rest_of_folder`: see `WeightsSnapshot`.
        """
        self._rest_of_folder = rest_of_folder
        self._cluster = cluster
        described = ((name, buckets.dtype_name(dtype), shape) for name, shape in shards.shapes)
        self._plan = GatherPlan(tuple(buckets.lay_out(described)), shards.num_ranks, bucket_bytes)
        self._gather = Gather(self._plan, shards.rank, device=device)
        self._gives = shards.is_first_replica
        # A group for the thread alone: its collectives must not mix with the training loop's.
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        timeout = timedelta(seconds=deadlines.WEIGHTS_COLLECTED_S)
        self._group = None if self._alone else dist.new_group(backend="gloo", timeout=timeout)
        self._is_main = self._alone or dist.get_rank() == 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agree-on-weights")
        self._stores = ThreadPoolExecutor(
            NUM_STORE_THREADS, "store-weights", initializer=_use, initargs=(device,)
        )
        self._with_deltas = with_deltas
        self._kept: dict[int, NDArray[np.uint8]] = {}  # this rank's bytes of `_since`, by bucket
        self._since: WeightsVersion | None = None
        self._count = 0  # collections so far
        self._own: dict[int, list[Stored]] = {}  # this rank's references, by collection
        # On rank 0: a bucket of each collection whose snapshot is still in use.
        self._live: WeakValueDictionary[int, WeightsBucket] = WeakValueDictionary()

    def collect(self, shards: Sequence[Tensor], *, version: WeightsVersion) -> Collected:
        """Copy the weights out of this rank's flat `shards`; they may change after the return."""
        self._count = count = self._count + 1
        let_go = self._thread.submit(self._let_go)
        held: list[Received] = []
        stored: list[Future[_Stored]] = []

        def store() -> None:
            own = (self._stores.submit(self._store, r, count, version, after=let_go) for r in held)
            stored.extend(own)
            held.clear()

        for received in self._gather.rounds(shards) if self._gives else ():
            held.append(received)
            if not self._gather.has_room:
                store()
        store()  # as late as there is room: it would take cores and memory of the copies
        return Collected(self._thread.submit(self._join, stored, count, version))

    def close(self) -> None:
        """Start no further work; running work ends by its deadline."""
        self._stores.shutdown(wait=False, cancel_futures=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    # Called in the threads.

    def _let_go(self) -> None:
        """Drop the references of collections whose snapshot rank 0 has dropped. Collective."""
        live = [sorted(self._live)]
        if not self._alone:
            dist.broadcast_object_list(live, src=0, group=self._group)
        self._own = {count: own for count, own in self._own.items() if count in live[0]}

    def _store(
        self, received: Received, count: int, version: WeightsVersion, *, after: Future[None]
    ) -> _Stored:
        try:
            after.result(deadlines.WEIGHTS_COLLECTED_S)  # room is made before more is stored
            if not received.is_finite():
                raise WeightSyncError(not_finite(self._not_finite(received), version))
            data = buckets.bytes_of(received.data)
            delta = self._changed(received.bucket, data) if self._with_deltas else None
            return _Stored(
                received.bucket,
                self._put(data, count),
                data.nbytes,
                buckets.checksum_of(data),
                (self._put(delta, count), delta.nbytes) if delta is not None else None,
            )
        finally:
            self._gather.free(received)

    def _put(self, data: NDArray[np.uint8], count: int) -> Exported:
        reference = self._cluster.put_bytes(data)
        self._own.setdefault(count, []).append(reference)
        return self._cluster.export_reference(reference)

    def _changed(self, bucket: int, data: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """A bucket's delta to the last collection; None: it is new, or the delta is too large."""
        if bucket not in self._kept:
            self._kept[bucket] = data.copy()
            return None
        delta: NDArray[np.uint8] | None = add_on("weight_delta").encode(
            data, self._kept[bucket], item_bytes=self._plan.item_bytes
        )
        np.copyto(self._kept[bucket], data)
        return delta if delta is not None and delta.nbytes * LEAST_GAIN <= data.nbytes else None

    def _not_finite(self, received: Received) -> str:
        """The name of the first parameter in a bucket with a number that is not finite."""
        tensors, pieces = self._plan.tensors, self._plan.pieces(received.bucket)
        parts = received.data.split([p.size_bytes // self._plan.item_bytes for p in pieces])
        for piece, part in zip(pieces, parts, strict=True):
            if not is_finite(part):
                return tensors[buckets.owner_of(tensors, piece.offset_bytes)].name
        return "?"

    def _join(
        self, stored: list[Future[_Stored]], count: int, version: WeightsVersion
    ) -> WeightsSnapshot | None:
        if error := next(filter(None, (future.exception() for future in stored)), None):
            is_ours = isinstance(error, WeightSyncError)
            share = _Share([], str(error) if is_ours else repr(error))
        else:
            share = _Share([future.result() for future in stored], "")
        since, self._since = self._since, version
        shares = [share]
        if not self._alone:
            shares *= dist.get_world_size()
            dist.all_gather_object(shares, share, group=self._group)
        if reason := next((each.error for each in shares if each.error), ""):
            self._own.pop(count, None)
            raise WeightSyncError(reason) from error
        if not self._is_main:
            return None
        snapshot = self._snapshot(shares, count, version)
        return replace(snapshot, is_base=self._with_deltas, delta_since=since)

    def _snapshot(
        self, shares: list[_Share], count: int, version: WeightsVersion
    ) -> WeightsSnapshot:
        every = sorted(stored for share in shares for stored in share.stored)
        imported = self._cluster.import_reference
        collected = tuple(
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
        if collected:
            self._live[count] = collected[0]
        return replace(self.outline(version), buckets=collected)

    def outline(self, version: WeightsVersion) -> WeightsSnapshot:
        """A snapshot of what is collected, without buckets."""
        return WeightsSnapshot(
            version, (), tensors=self._plan.tensors, rest_of_folder=self._rest_of_folder
        )


def _use(device: torch.device) -> None:
    """Have a thread use the rank's device, or it would hold memory of the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class Collected:
    """A collection that threads may still be storing; every rank has one."""

    def __init__(self, outcome: Future[WeightsSnapshot | None]) -> None:
        self._outcome = outcome

    def wait(self) -> WeightsSnapshot | None:
        """Wait until all ranks have stored their share; the snapshot on rank 0, None elsewhere.

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
    """What one rank tells the others after a collection."""

    stored: list[_Stored]
    error: str  # why this rank could not store its buckets; empty: it has


class _Stored(NamedTuple):
    """A bucket in the object store, in a form that its rank can send to the others."""

    bucket: int
    reference: Exported
    size_bytes: int
    checksum: int
    delta: tuple[Exported, int] | None  # its reference and size


class Publisher:
    """Puts whole parameters into the object store and reads snapshots out of it."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        dtype: torch.dtype = torch.float32,
        bucket_bytes: int = buckets.BUCKET_BYTES,
    ) -> None:
        self.dtype = dtype
        self._cluster = cluster
        self._bucket_bytes = bucket_bytes

    def pack(
        self, named_tensors: buckets.NamedTensors, *, version: WeightsVersion
    ) -> WeightsSnapshot:
        """Put whole tensors of this process, cast to `dtype`, into the object store.

        Raises:
            WeightSyncError: a parameter is not finite; nothing is published.
        """
        checked = _checked(named_tensors, dtype=self.dtype, version=version)
        put, size = self._cluster.put_bytes, self._bucket_bytes
        return buckets.pack(checked, put=put, version=version, bucket_bytes=size)

    def read(self, snapshot: WeightsSnapshot) -> Iterator[tuple[str, Tensor]]:
        """The parameters of a snapshot, verified; each is a copy.

        Raises `WeightSyncError` when bytes are damaged or missing.
        """
        timeout_s = deadlines.BUCKET_HERE_S
        wait = partial(self._cluster.wait, timeout_s=timeout_s, who="the object store")
        return buckets.unpack(snapshot, (wait(bucket.data) for bucket in snapshot.buckets))


def _checked(
    named_tensors: buckets.NamedTensors, *, dtype: torch.dtype, version: WeightsVersion
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named_tensors:
        sent = tensor.detach().to(dtype)
        if not is_finite(sent):
            raise WeightSyncError(not_finite(name, version))
        yield name, sent


def not_finite(name: str, version: WeightsVersion) -> str:
    """The error message for weights that must not be published."""
    return (
        f"weights must be finite to be published, {name!r} of version {version} is not: "
        "training has diverged, lower --learning-rate or --max-grad-norm"
    )
