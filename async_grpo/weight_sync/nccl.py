"""Weights over NCCL: vLLM's stock trainer engine, one group for trainer rank 0 and one worker.

Imported on demand: vLLM costs the trainer seconds.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
)

from async_grpo.types import WeightsSnapshot, WorkerInfo
from async_grpo.weight_sync.buckets import torch_dtype
from async_grpo.weight_sync.links import OnFailure, Sender, WorkerClient, device_tensors
from async_grpo.weight_sync.routes import check_group


class SnapshotSource(WeightSource):
    """A snapshot in host memory, as vLLM reads weights."""

    def __init__(self, snapshot: WeightsSnapshot, device: torch.device) -> None:
        self._snapshot = snapshot
        self._device = device

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(meta.name, torch_dtype(meta.dtype), meta.shape)
            for meta in self._snapshot.tensors
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return device_tensors(self._snapshot, self._device)


class NcclLink:
    """The rendezvous is made with the first update and kept until the worker leaves."""

    def __init__(self, client: WorkerClient, *, worker: WorkerInfo, sender: Sender) -> None:
        self._client = client
        self._num_receivers = len(worker.devices)
        self._sender = sender
        self._engine: NCCLTrainerWeightTransferEngine | None = None
        # Its own, so that a receiver that hangs holds up no other link. None: not a CUDA device.
        on_cuda = sender.device.type == "cuda"
        self._stream = torch.cuda.Stream(sender.device) if on_cuda else None

    def send(self, snapshot: WeightsSnapshot, *, deadline: float, on_failure: OnFailure) -> None:
        """See `Link`; one parameter at a time travels, in the snapshot's order."""
        self._client.prepare(snapshot, deadline=deadline, on_failure=on_failure)
        device = self._sender.device
        source = SnapshotSource(snapshot, device)
        with torch.accelerator.device_index(device.index), torch.cuda.stream(self._stream):
            if self._engine is None:
                self._engine = self._rendezvous(source)
            self._engine.source = source
            self._engine.send_weights()

    def close(self) -> None:
        """Abort the communicator: kernels that wait for a dead receiver end."""
        if self._engine is not None:
            self._engine.shutdown()

    def _rendezvous(self, source: SnapshotSource) -> NCCLTrainerWeightTransferEngine:
        info = NCCLTrainerInitInfo(
            master_address=self._sender.address,
            master_port=_free_port(self._sender.address),
            world_size=1 + self._num_receivers,
            packed=False,  # packed chunks would share two streams among all links
            rank=0,
        )
        engine = NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=self._client, source=source
        )
        check_group(engine.model_update_group)
        return engine


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
