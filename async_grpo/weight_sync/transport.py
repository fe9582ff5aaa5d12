"""How published weights reach the workers: one small protocol, a file a transport.

Every transport starts from the same snapshot in the object store. A device transport is a faster
path ahead of it: a worker that it does not reach, or that joins later, loads from the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import ray
import torch

from async_grpo.devices.current import device_id
from async_grpo.types import PublishReport, WeightsSnapshot, WorkerInfo
from async_grpo.weight_sync.device import DeviceTransport
from async_grpo.weight_sync.links import Link, Sender, WorkerClient
from async_grpo.weight_sync.publisher import Publisher, Roles
from async_grpo.weight_sync.routes import OBJECT_STORE, check_route

if TYPE_CHECKING:
    from async_grpo.controller.client import RunClient
    from async_grpo.types.handles import WorkerHandle


class Transport(Protocol):
    """Brings a snapshot to all workers; the publisher, through the object store, is the simplest.

    One more for devices is a `Link` in a file of its own, named in `open_transport` and `routes`.
    """

    def announce(
        self, client: RunClient, snapshot: WeightsSnapshot, *, roles: Roles, timeout_s: float
    ) -> dict[str, PublishReport]:
        """Have the workers of some roles serve a snapshot; reports by role.

        Raises:
            DeadlineError: the controller did not answer.
            ProcessLostError: it died, or the run has ended there.
        """
        ...


def open_transport(name: str, publisher: Publisher) -> Transport:
    """The transport of `--weight-transport`, in trainer rank 0; `check_route` has let it pass."""
    if name == OBJECT_STORE:
        return publisher
    # Imported on demand: it imports vLLM, which costs the trainer seconds.
    from async_grpo.weight_sync.nccl import NcclLink

    device = torch.device("cuda", torch.cuda.current_device())
    sender = Sender(device, device_id(), ray.util.get_node_ip_address())

    def connect(worker: WorkerInfo, handle: WorkerHandle) -> Link:
        check_route(name, worker, sender=sender.device_id)
        client = WorkerClient(handle, who=f"{worker.role} worker {worker.worker_id}")
        return NcclLink(client, worker=worker, sender=sender)

    return DeviceTransport(publisher, connect)
