"""Weights over NCCL: vLLM's trainer engine, with one group for trainer rank 0 and all workers.

An add-on, imported on demand: importing vLLM takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
)

from async_grpo.types import WeightsSnapshot
from async_grpo.util.ports import free_port
from async_grpo.weight_sync.buckets import NamedTensors, torch_dtype
from async_grpo.weight_sync.routes import check_group
from async_grpo.weight_sync.transport import Members, OnFailure, Sender, WorkersClient


class GatheredSource(WeightSource):
    """The parameters that the ranks gather on their devices, for vLLM to read once."""

    def __init__(self, snapshot: WeightsSnapshot, tensors: NamedTensors) -> None:
        self._snapshot = snapshot
        self._tensors = tensors

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(meta.name, torch_dtype(meta.dtype), meta.shape)
            for meta in self._snapshot.tensors
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors)


class NcclLink:
    """A `Link` over NCCL. The first update makes the rendezvous; it lasts as long as the link."""

    def __init__(self, members: Members, *, sender: Sender) -> None:
        self._client = WorkersClient(members, sender.cluster)
        self._sender = sender
        self._info = NCCLTrainerInitInfo(
            master_address=sender.address,
            master_port=0,
            world_size=1 + sum(len(worker.devices) for worker in members),
            packed=True,  # many parameters at a time, in two buffers of a GiB
            rank=0,
        )
        self._engine: NCCLTrainerWeightTransferEngine | None = None

    def send(
        self,
        snapshot: WeightsSnapshot,
        tensors: NamedTensors,
        *,
        deadline: float,
        on_failure: OnFailure,
    ) -> None:
        """See `Link`; parameters travel in the snapshot's order."""
        self._client.prepare(snapshot, deadline=deadline, on_failure=on_failure)
        source = GatheredSource(snapshot, tensors)
        with torch.accelerator.device_index(self._sender.device.index):  # this is a thread
            if self._engine is None:
                self._engine = self._rendezvous(source)
            self._engine.source = source
            self._engine.send_weights()

    def close(self) -> None:
        """Abort the communicator, so that kernels waiting for a dead receiver end."""
        if self._engine is not None:
            self._engine.shutdown()

    def _rendezvous(self, source: WeightSource) -> NCCLTrainerWeightTransferEngine:
        info = replace(self._info, master_port=free_port(self._sender.address))
        engine = NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=self._client, source=source
        )
        check_group(engine.model_update_group)
        return engine
