"""Gathers each bucket of the weights on the rank that owns it, in a few buffers that are reused.

The trainer's ranks hold each parameter by rows, `ceil(rows / ranks)` each, the last ones fewer or
none. A bucket takes the same share of every rank's rows, so that in a round of as many buckets as
there are ranks every rank sends and receives as much as any other:

    rows of p   0 1 2 | 3 4 5 | 6 7     three ranks hold 3, 3 and 2
    bucket 0    0       3       6       and each sends its part of a bucket to the bucket's owner:
    bucket 1      1       4       7     rank 0, 1, 2, 0, ...
    bucket 2        2       5

One round is one `all_to_all_single` in which every rank receives the bucket that it owns. No rank
ever holds more of the whole weights than a few buckets.
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
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from async_grpo.model.policy import PolicyModel
from async_grpo.model.served import Served
from async_grpo.model.weight_files import own_rows
from async_grpo.types import Piece, TensorMeta
from async_grpo.util import deadlines
from async_grpo.util.errors import DeadlineError
from async_grpo.weight_sync.buckets import ITEM_BYTES, torch_dtype

NUM_HOST_BUFFERS = 3  # on a CPU; on a device 2, beside the 2 buffers on the device itself


class Gather:
    """One rank's share of every gather."""

    def __init__(self, plan: GatherPlan, shards: Shards, *, device: torch.device) -> None:
        self._plan = plan
        self._shards = shards
        self._device = device
        self._dtype = torch_dtype(plan.tensors[0].dtype) if plan.tensors else torch.float32
        self._on_cpu = device.type == "cpu"
        alone = shards.group is None
        self._num_missing = NUM_HOST_BUFFERS + alone if self._on_cpu else NUM_HOST_BUFFERS - 1
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._scratch: dict[str, Tensor] = {}

    def rounds(self, shards: Sequence[Tensor]) -> Iterator[Received]:
        """This rank's buckets, one a round, out of all ranks' flat shards; collective.

        Numbers are cast to the published dtype on their device. Hand each bucket back to `free`:
        raises `DeadlineError` when no buffer becomes free in time.
        """
        for number in range(self._plan.num_rounds):
            host = self._host_buffer()
            bucket = number * self._plan.num_ranks + self._shards.rank
            yield self._to_host(self._exchange(number, shards, host), host, bucket)

    def free(self, received: Received) -> None:
        """Let the memory of a bucket be reused. Called from any thread."""
        self._free.put(received.data)

    def _exchange(self, number: int, shards: Sequence[Tensor], host: Tensor) -> Tensor:
        plan, rank, num_ranks = self._plan, self._shards.rank, self._shards.num_ranks
        buckets = [number * num_ranks + owner for owner in range(num_ranks)]
        into = [plan.num_elements(buckets[rank], source) for source in range(num_ranks)]
        received = host[: sum(into)] if self._on_cpu else self._memory("received")[: sum(into)]
        out = [plan.num_elements(bucket, rank) for bucket in buckets]
        sent = received if num_ranks == 1 else self._memory("sent")[: sum(out)]
        at = 0
        for bucket in buckets:
            for index, start, stop in plan.slices(bucket, rank):
                sent[at : at + stop - start].copy_(shards[index][start:stop])
                at += stop - start
        if num_ranks > 1:
            size = plan.item_bytes
            dist.all_to_all_single(
                received.view(torch.uint8),
                sent.view(torch.uint8),
                [count * size for count in into],
                [count * size for count in out],
                group=self._shards.group,
            )
        return received

    def _to_host(self, received: Tensor, host: Tensor, bucket: int) -> Received:
        data = host[: received.numel()]
        if self._on_cpu:
            return Received(bucket, data, lambda: is_finite(data))
        extremes = torch.empty(2, dtype=self._dtype, pin_memory=True)
        if received.numel():
            extremes.copy_(torch.stack(torch.aminmax(received)), non_blocking=True)
        data.copy_(received, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def finite() -> bool:
            done.synchronize()
            return not data.numel() or is_finite(extremes)

        return Received(bucket, data, finite)

    def _host_buffer(self) -> Tensor:
        """Host memory for a bucket, pinned where a device copies into it."""
        if self._num_missing and self._free.empty():
            self._num_missing -= 1
            pinned = not self._on_cpu
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

    def _memory(self, name: str) -> Tensor:
        """Memory for a bucket on the parameters' device, made at the first call for `name`."""
        if name not in self._scratch:
            most = self._plan.most_elements
            self._scratch[name] = torch.empty(most, dtype=self._dtype, device=self._device)
        return self._scratch[name]


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A bucket of this rank, perhaps still being copied to host memory."""

    bucket: int
    data: Tensor  # flat, on the host; goes back to `Gather.free`
    is_finite: Callable[[], bool]  # waits until `data` is complete


@dataclass(frozen=True)
class GatherPlan:
    """What each rank sends to the owner of each bucket; the same on all ranks."""

    tensors: tuple[TensorMeta, ...]  # all of one dtype
    num_ranks: int
    bucket_bytes: int  # the largest size of a bucket

    @property
    def num_buckets(self) -> int:
        return self.num_rounds * self.num_ranks

    @cached_property
    def num_rounds(self) -> int:
        round_bytes = max(self.bucket_bytes, self.num_ranks * self.item_bytes) * self.num_ranks
        return -(-self._ends[-1] * self.num_ranks * self.item_bytes // round_bytes)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.tensors[0].dtype] if self.tensors else 1

    @property
    def most_elements(self) -> int:
        """The most elements in a bucket, and the most that a rank sends in a round."""
        return self._width * self.num_ranks

    def slices(self, bucket: int, rank: int) -> Iterator[Slice]:
        """The parts of a bucket that `rank` holds, in their order in the bucket."""
        low, high = bucket * self._width, (bucket + 1) * self._width
        first = bisect.bisect_right(self._ends, low) - 1
        for index in range(max(first, 0), len(self.tensors)):
            begin = self._ends[index]
            if begin >= high:
                return
            held = self.num_held(index, rank)
            start, stop = max(low - begin, 0), min(high - begin, held)
            if start < stop:
                yield Slice(index, start, stop)

    def num_elements(self, bucket: int, rank: int) -> int:
        return sum(stop - start for _, start, stop in self.slices(bucket, rank))

    def pieces(self, bucket: int) -> tuple[Piece, ...]:
        """The pieces of a bucket in order: those of rank 0, then those of rank 1, and so on."""
        return tuple(
            Piece(
                self.tensors[index].offset_bytes
                + (rank * self._chunks[index] + start) * self.item_bytes,
                (stop - start) * self.item_bytes,
            )
            for rank in range(self.num_ranks)
            for index, start, stop in self.slices(bucket, rank)
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

    @cached_property
    def _width(self) -> int:
        """Elements of each rank in a bucket; the last buckets may have fewer."""
        return max(-(-self._ends[-1] // max(self.num_buckets, 1)), 1)


class Slice(NamedTuple):
    """Elements [start, stop) of the part of a parameter that one rank holds."""

    parameter: int  # index
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """How the policy is sharded: by rows, over the `num_ranks` ranks of `group`.

    Where each rank holds all of the model, as if it were sharded: each publishes its own rows.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # of whole tensors, by their published names
    group: dist.ProcessGroup | None  # None: this rank holds everything
    rank: int  # in the group
    num_ranks: int
    is_first_replica: bool  # of the groups that hold the same shards: this one publishes them

    @classmethod
    def of(cls, policy: PolicyModel, tensors: Mapping[str, Served]) -> Shards:
        """How `tensors` of a policy are sharded, which may also be whole on one rank."""
        shapes = tuple((name, each.shape) for name, each in tensors.items())
        first = next((p for p in policy.parameters() if isinstance(p, DTensor)), None)
        if first is None:
            return cls(shapes, None, 0, 1, is_first_replica=True)
        first = own_rows(first)
        mesh = first.device_mesh
        dim = next(i for i, placement in enumerate(first.placements) if placement.is_shard())
        others = [mesh.get_local_rank(i) for i in range(mesh.ndim) if i != dim]
        return cls(
            shapes,
            mesh.get_group(dim) if mesh.size(dim) > 1 else None,
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
