"""What a device transport needs of the trainer's side: the workers' calls, all of them at once."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from async_grpo.cluster import cluster
from async_grpo.types import WeightsSnapshot, WorkerInfo
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, DeadlineError
from async_grpo.weight_sync.buckets import NamedTensors, unpack

if TYPE_CHECKING:
    from async_grpo.controller.handles import WorkerHandle

OnFailure = Callable[[Exception], None]
Members = Mapping[WorkerInfo, "WorkerHandle"]
LOOK_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class Sender:
    """Trainer rank 0, as links see it."""

    device: torch.device
    device_id: str  # the same in every process, unlike the index
    address: str  # of its machine


class Link(Protocol):
    """The way from trainer rank 0 to all workers."""

    def send(
        self,
        snapshot: WeightsSnapshot,
        tensors: NamedTensors,
        *,
        deadline: float,
        on_failure: OnFailure,
    ) -> None:
        """Have the workers serve a snapshot before `deadline`, in `time.monotonic` seconds.

        Raises on any failure; the caller must then close the link. It calls `on_failure` as soon as
        a worker refuses or dies, because `send` itself may be blocked on a device, where no
        exception reaches it.
        """
        ...

    def close(self) -> None:
        """Let go of the workers, also from another thread while `send` hangs."""
        ...


class WorkersClient:
    """vLLM's own protocol of a weight update (`VLLMWeightSyncClient`), with workers by Ray."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def prepare(self, snapshot: WeightsSnapshot, *, deadline: float, on_failure: OnFailure) -> None:
        """What the next update brings, and until when every call of it must have been answered."""
        self._snapshot, self._deadline, self._on_failure = snapshot, deadline, on_failure

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each worker's processes have ranks of their own, after those of the workers before it."""
        calls, offset, left_s = {}, init_info["rank_offset"], self._remaining_s()
        for worker, handle in self._members.items():
            calls[worker] = handle.open_route.remote({**init_info, "rank_offset": offset}, left_s)
            offset += len(worker.devices)
        self._wait(calls)

    def start_weight_update(self) -> None:
        """Nothing: `DeviceSender` has asked each worker whether it would take these weights."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Return when all workers have received all parameters, and serve them."""
        left_s = self._remaining_s()
        calls = {
            worker: handle.receive_weights.remote(self._snapshot, update_info, left_s)
            for worker, handle in self._members.items()
        }
        self._wait(calls)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Nothing is left to do."""

    def _remaining_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def _wait(self, calls: Mapping[WorkerInfo, Awaitable[None]]) -> None:
        try:
            wait_for_all(calls, deadline=self._deadline)
        except AsyncGrpoError as error:
            self._on_failure(error)
            raise


def wait_for_all(calls: Mapping[WorkerInfo, Awaitable[None]], *, deadline: float) -> None:
    """Until all workers have answered; raises the first failure at once, whoever still runs."""
    waiting = dict(calls)
    while waiting:
        for worker in [worker for worker, call in waiting.items() if cluster.is_ready(call)]:
            who = f"{worker.role} worker {worker.worker_id}"
            cluster.wait(waiting.pop(worker), timeout_s=deadlines.ANSWER_S, who=who)
        if waiting and time.monotonic() > deadline:
            names = ", ".join(worker.worker_id for worker in waiting)
            raise DeadlineError(f"no answer in time from worker {names}")
        time.sleep(LOOK_INTERVAL_S if waiting else 0.0)


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
