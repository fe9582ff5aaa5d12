"""Brings each bucket of the weights to the rank that owns it, through memory that is used again.

One round is one `all_to_all_single` in which every rank receives the bucket that it owns: each
moves as much as any other, and no rank ever holds more than buckets.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from async_grpo.util import deadlines
from async_grpo.util.errors import DeadlineError
from async_grpo.weight_sync.buckets import torch_dtype
from async_grpo.weight_sync.layout import GatherPlan
from async_grpo.weight_sync.shards import Shards

NUM_HOST_BUFFERS = 3  # on a CPU; one beside what is sent. On a device two, which has two itself


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A bucket of this rank on its way to host memory."""

    bucket: int
    data: Tensor  # flat, on the host; to be given back to `Gather.free`
    is_finite: Callable[[], bool]  # waits until all of `data` is there


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

    def rounds(self, shards: list[Tensor]) -> Iterator[Received]:
        """This rank's buckets out of all ranks' flat shards, cast on their device; collective.

        Raises `DeadlineError` when nobody frees what was received.
        """
        for number in range(self._plan.num_rounds):
            host = self._host_buffer()
            bucket = number * self._plan.num_ranks + self._shards.rank
            yield self._to_host(self._exchange(number, shards, host), host, bucket)

    def free(self, received: Received) -> None:
        """Its memory may be filled again; from any thread."""
        self._free.put(received.data)

    def _exchange(self, number: int, shards: list[Tensor], host: Tensor) -> Tensor:
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
        """Memory for a bucket; pinned where a device copies into it."""
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
        """Memory on the parameters' device for a bucket."""
        if name not in self._scratch:
            most = self._plan.most_elements
            self._scratch[name] = torch.empty(most, dtype=self._dtype, device=self._device)
        return self._scratch[name]


def is_finite(tensor: Tensor) -> bool:
    """Whether every number of it is; one pass, where `isfinite` makes several of its own.

    >>> nan = float("nan")
    >>> [is_finite(torch.tensor(values)) for values in ([1.0], [], [1.0, nan], [-math.inf, 1.0])]
    [True, True, False, False]
    """
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # not a number as soon as one element is not
    return math.isfinite(low) and math.isfinite(high)
