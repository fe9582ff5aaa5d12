"""How published weights reach the workers: one small protocol, a file a transport.

Every publication goes through the object store (`publisher.py`). A device transport is a faster
path ahead of it: a worker that it does not reach, or that joins later, loads from the store. One
more for devices is a `Link` in a file of its own, named in `open_sender` and `routes`.
"""

from __future__ import annotations

import ray
import torch

from async_grpo.devices.current import device_id
from async_grpo.types import WorkerInfo
from async_grpo.weight_sync.device import DeviceSender
from async_grpo.weight_sync.links import Link, Members, Sender
from async_grpo.weight_sync.routes import OBJECT_STORE, check_route


def open_sender(name: str) -> DeviceSender | None:
    """What `--weight-transport` adds to the object store, in trainer rank 0."""
    if name == OBJECT_STORE:
        return None
    # Imported on demand: it imports vLLM, which costs the trainer seconds.
    from async_grpo.weight_sync.nccl import NcclLink

    device = torch.device("cuda", torch.cuda.current_device())
    sender = Sender(device, device_id(), ray.util.get_node_ip_address())

    def check(worker: WorkerInfo) -> None:
        check_route(name, worker, sender=sender.device_id)

    def connect(members: Members) -> Link:
        return NcclLink(members, sender=sender)

    return DeviceSender(connect, check=check)
