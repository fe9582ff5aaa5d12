"""Copies each rank's rows of the weights into its buckets, in a few buffers that are reused.

The trainer's ranks hold each parameter by rows, `ceil(rows / ranks)` each, the last ones fewer or
none. A rank's buckets hold its own rows, so that no weights travel between ranks:

    rows of p   0 1 2 | 3 4 5 | 6 7     three ranks hold 3, 3 and 2
    buckets 0, 1, 2   0 1  3 4  6 7     the first of each rank
    buckets 3, 4, 5   2    5            the second of each, where it has as much

Buckets of the same round hold about the same parameters: who reads them in order soon has each
parameter whole. No process ever holds more of the whole weights than a few buckets.
"""

from __future__ import annotations

import bisect
import math
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from async_grpo.model.policy import PolicyModel
from async_grpo.model.served import Served
from async_grpo.model.weight_files import own_rows
from async_grpo.types import Piece, TensorMeta
from async_grpo.util import deadlines
from async_grpo.util.errors import DeadlineError
from async_grpo.weight_sync.buckets import ITEM_BYTES, torch_dtype

NUM_HOST_BUFFERS = 12  # that wait for the object store before the rank does; pinned for a device


class Gather:
    """One rank's buckets of all its rows."""

    def __init__(self, plan: GatherPlan, rank: int, *, device: torch.device) -> None:
        self._plan = plan
        self._rank = rank
        self._device = device
        self._dtype = torch_dtype(plan.tensors[0].dtype) if plan.tensors else torch.float32
        self._num_missing = NUM_HOST_BUFFERS
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def rounds(self, shards: Sequence[Tensor]) -> Iterator[Received]:
        """This rank's buckets, one a round, out of its flat shards.

        Numbers are cast to the published dtype on their device. Hand each bucket back to `free`:
        raises `DeadlineError` when no buffer becomes free in time.
        """
        for number in range(self._plan.num_rounds):
            bucket = number * self._plan.num_ranks + self._rank
            if size := self._plan.num_elements(bucket):
                host = self._host_buffer()[:size]
                on_cpu = self._device.type == "cpu"
                self._fill(host if on_cpu else self._scratch[:size], bucket, shards)
                yield self._to_host(host, bucket)

    @property
    def has_room(self) -> bool:
        """Whether the next bucket need not wait for memory."""
        return self._num_missing > 0 or not self._free.empty()

    def free(self, received: Received) -> None:
        """Let the memory of a bucket be reused. Called from any thread."""
        self._free.put(received.data)

    def _fill(self, data: Tensor, bucket: int, shards: Sequence[Tensor]) -> None:
        at = 0
        for index, start, stop in self._plan.slices(bucket):
            part = shards[index][start:stop].to(self._device)  # or the host would cast it
            data[at : at + stop - start].copy_(part)
            at += stop - start

    def _to_host(self, data: Tensor, bucket: int) -> Received:
        if self._device.type == "cpu":
            return Received(bucket, data, lambda: is_finite(data))
        filled = self._scratch[: len(data)]
        extremes = torch.empty(2, dtype=self._dtype, pin_memory=True)
        extremes.copy_(torch.stack(torch.aminmax(filled)), non_blocking=True)
        data.copy_(filled, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def finite() -> bool:
            done.synchronize()
            return is_finite(extremes)

        return Received(bucket, data, finite)

    def _host_buffer(self) -> Tensor:
        """Host memory for a bucket, pinned where a device copies into it."""
        if self._num_missing and self._free.empty():
            self._num_missing -= 1
            pinned = self._device.type != "cpu"
            return torch.empty(self._plan.most_elements, dtype=self._dtype, pin_memory=pinned)
        try:
            held = self._free.get(timeout=deadlines.BUCKET_STORED_S)
        except queue.Empty:
            raise DeadlineError(
                "no bucket of weights was stored within "
                f"{deadlines.BUCKET_STORED_S:g} s: look at the load of this rank's machine"
            ) from None
        whole: Tensor = held if held._base is None else held._base
        return whole

    @cached_property
    def _scratch(self) -> Tensor:
        """Memory for a bucket on the parameters' device; the copies of its stream are in order."""
        return torch.empty(self._plan.most_elements, dtype=self._dtype, device=self._device)


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A bucket of this rank, perhaps still being copied to host memory."""

    bucket: int  # see `GatherPlan`
    data: Tensor  # flat, on the host; goes back to `Gather.free`
    is_finite: Callable[[], bool]  # waits until `data` is complete


@dataclass(frozen=True)
class GatherPlan:
    """Which rows each bucket holds; the same on all ranks.

    Bucket `round * num_ranks + rank` is that of a rank in a round; some are empty.
    """

    tensors: tuple[TensorMeta, ...]  # all of one dtype
    num_ranks: int
    bucket_bytes: int  # the largest size of a bucket

    @property
    def num_buckets(self) -> int:
        return self.num_rounds * self.num_ranks

    @property
    def num_rounds(self) -> int:
        return -(-self._ends[-1] * self.item_bytes // max(self.bucket_bytes, self.item_bytes))

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.tensors[0].dtype] if self.tensors else 1

    @cached_property
    def most_elements(self) -> int:
        """The most elements in a bucket; the last ones may have fewer."""
        return max(-(-self._ends[-1] // max(self.num_rounds, 1)), 1)

    def slices(self, bucket: int) -> Iterator[Slice]:
        """The parts of its rank's shards that a bucket holds, in their order in it."""
        number, rank = divmod(bucket, self.num_ranks)
        low, high = number * self.most_elements, (number + 1) * self.most_elements
        first = bisect.bisect_right(self._ends, low) - 1
        for index in range(max(first, 0), len(self.tensors)):
            begin = self._ends[index]
            if begin >= high:
                return
            held = self.num_held(index, rank)
            start, stop = max(low - begin, 0), min(high - begin, held)
            if start < stop:
                yield Slice(index, start, stop)

    def num_elements(self, bucket: int) -> int:
        return sum(stop - start for _, start, stop in self.slices(bucket))

    def pieces(self, bucket: int) -> tuple[Piece, ...]:
        """The pieces of a bucket in order."""
        rank = bucket % self.num_ranks
        return tuple(
            Piece(
                self.tensors[index].offset_bytes
                + (rank * self._chunks[index] + start) * self.item_bytes,
                (stop - start) * self.item_bytes,
            )
            for index, start, stop in self.slices(bucket)
        )

    def num_held(self, index: int, rank: int) -> int:
        """Elements of a parameter on a rank, as FSDP2 shards it.

        >>> plan = GatherPlan((TensorMeta("w", "float32", (5, 2), 0),), 3, 1 << 20)
        >>> [plan.num_held(0, rank) for rank in range(3)]
        [4, 4, 2]
        """
        chunk, total = self._chunks[index], math.prod(self.tensors[index].shape)
        return min((rank + 1) * chunk, total) - min(rank * chunk, total)

    @cached_property
    def _chunks(self) -> list[int]:
        """Elements of each parameter on the rank that holds most of it."""
        shapes = [meta.shape for meta in self.tensors]
        return [-(-math.prod(s[:1]) // self.num_ranks) * math.prod(s[1:]) for s in shapes]

    @cached_property
    def _ends(self) -> list[int]:
        """Where each parameter begins among the elements of a rank with a full share of all."""
        return list(accumulate(self._chunks, initial=0))


class Slice(NamedTuple):
    """Elements [start, stop) of the part of a parameter that one rank holds."""

    parameter: int  # index
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """How the policy is sharded: by rows, over `num_ranks` ranks.

    Where each rank holds all of the model, as if it were sharded: each publishes its own rows.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # of whole tensors, by their published names
    rank: int  # of those that together hold the model
    num_ranks: int
    is_first_replica: bool  # of the groups that hold the same shards: this one publishes them

    @classmethod
    def of(cls, policy: PolicyModel, tensors: Mapping[str, Served]) -> Shards:
        """How `tensors` of a policy are sharded, which may also be whole on one rank."""
        shapes = tuple((name, each.shape) for name, each in tensors.items())
        first = next((p for p in policy.parameters() if isinstance(p, DTensor)), None)
        if first is None:
            return cls(shapes, 0, 1, is_first_replica=True)
        first = own_rows(first)
        mesh = first.device_mesh
        dim = next(i for i, placement in enumerate(first.placements) if placement.is_shard())
        others = [mesh.get_local_rank(i) for i in range(mesh.ndim) if i != dim]
        return cls(
            shapes,
            mesh.get_local_rank(dim),
            mesh.size(dim),
            is_first_replica=not any(others),
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether every number is finite; one pass over memory, where `isfinite` makes several.

    >>> nan = float("nan")
    >>> [is_finite(torch.tensor(values)) for values in ([1.0], [], [1.0, nan], [-math.inf, 1.0])]
    [True, True, False, False]
    """
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # NaN as soon as one element is
    return math.isfinite(low) and math.isfinite(high)
