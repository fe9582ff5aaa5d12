"""What every device transport needs of the trainer's side: a link a worker, and who answers it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from async_grpo import cluster, deadlines
from async_grpo.errors import AsyncGrpoError
from async_grpo.types import WeightsSnapshot
from async_grpo.weight_sync.buckets import unpack

if TYPE_CHECKING:
    from async_grpo.types.handles import WorkerHandle

OnFailure = Callable[[Exception], None]


@dataclass(frozen=True, slots=True)
class Sender:
    """Trainer rank 0, as links see it."""

    device: torch.device
    device_id: str  # the same in every process, unlike the index
    address: str  # of its machine


class Link(Protocol):
    """The way from trainer rank 0 to one worker."""

    def send(self, snapshot: WeightsSnapshot, *, deadline: float, on_failure: OnFailure) -> None:
        """Have the worker serve a snapshot before `deadline`, in `time.monotonic` seconds.

        Raises on any failure; the caller must then close the link. It calls `on_failure` as soon as
        the worker refuses or dies, because `send` itself may be blocked on a device, where no
        exception reaches it.
        """
        ...

    def close(self) -> None:
        """Let go of the worker, also from another thread while `send` hangs."""
        ...


class WorkerClient:
    """vLLM's own protocol of a weight update (`VLLMWeightSyncClient`), with one worker by Ray."""

    def __init__(self, handle: WorkerHandle, *, who: str) -> None:
        self._handle = handle
        self._who = who

    def prepare(self, snapshot: WeightsSnapshot, *, deadline: float, on_failure: OnFailure) -> None:
        """What the next update brings, and until when every call of it must have been answered."""
        self._snapshot, self._deadline, self._on_failure = snapshot, deadline, on_failure

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._wait(self._handle.open_route.remote(init_info, self._remaining_s()))

    def start_weight_update(self) -> None:
        """Have the worker refuse what it could not load; nothing of it has changed yet."""
        self._wait(self._handle.expect_weights.remote(self._snapshot))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Return when the worker has received all parameters, and serves them."""
        timeout_s = self._remaining_s()
        self._wait(self._handle.receive_weights.remote(self._snapshot, update_info, timeout_s))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Nothing is left to do."""

    def _remaining_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def _wait(self, call: Awaitable[None]) -> None:
        try:
            cluster.wait(call, timeout_s=self._remaining_s(), who=self._who)
        except AsyncGrpoError as error:
            self._on_failure(error)
            raise


def device_tensors(
    snapshot: WeightsSnapshot, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a snapshot, verified, moved to a device one at a time.

    Raises `WeightSyncError` when bytes are not those that were gathered.
    """
    data = (
        cluster.wait(bucket.data, timeout_s=deadlines.BUCKET_HERE_S, who="the object store")
        for bucket in snapshot.buckets
    )
    for name, tensor in unpack(snapshot, data):
        yield name, tensor.to(device)
