"""The trainer's ranks: started by torchrun, or one alone; they agree on errors before they work."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from async_grpo.errors import AsyncGrpoError

T = TypeVar("T")
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """This process among the trainer's processes."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    @classmethod
    def start(cls, *, timeout_s: float) -> Ranks:
        """Join the process group that torchrun describes; without torchrun, be the only rank.

        A collective that a rank does not reach within `timeout_s` ends the others.
        """
        if "RANK" not in os.environ:
            os.environ.update(ALONE, MASTER_PORT="0")
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        return cls(dist.get_rank(), dist.get_world_size(), device, mesh)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def on_main(self, prepare: Callable[[], T]) -> T | None:
        """What `prepare` returns on rank 0, where alone it runs; None on the other ranks.

        An error for the user that it raises is raised on every rank.
        """
        result: T | None = None
        error: AsyncGrpoError | None = None
        if self.is_main:
            try:
                result = prepare()
            except AsyncGrpoError as raised:
                error = raised
        message = [str(error) if error else None]
        dist.broadcast_object_list(message, src=0)
        if error is not None:
            raise error
        if message[0] is not None:
            raise AsyncGrpoError(message[0])
        return result

    def stop(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()
