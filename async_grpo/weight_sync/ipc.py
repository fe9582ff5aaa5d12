"""Weights through one buffer on a device that trainer rank 0 and the worker share.

The buffer is filled by vLLM's stock producer; vLLM's trainer engine around it is not used, because
it needs every trainer rank in each transfer. Imported on demand: vLLM costs the trainer seconds.
"""

from __future__ import annotations

import torch
from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

from async_grpo.types import WeightsSnapshot, WorkerInfo
from async_grpo.weight_sync.buckets import BUCKET_BYTES, tensor_bytes
from async_grpo.weight_sync.ipc_handle import plain_handle
from async_grpo.weight_sync.links import OnFailure, Sender, WorkerClient, device_tensors


class IpcLink:
    """Needs no rendezvous; the buffer lives as long as an update."""

    def __init__(self, client: WorkerClient, *, worker: WorkerInfo, sender: Sender) -> None:
        self._client = client
        self._sender = sender
        self._opened = False

    def send(self, snapshot: WeightsSnapshot, *, deadline: float, on_failure: OnFailure) -> None:
        """See `Link`; the buffer is filled again when the worker has copied what it held."""
        self._client.prepare(snapshot, deadline=deadline, on_failure=on_failure)
        if not self._opened:
            self._client.init_weight_transfer_engine({"packed": True})
            self._opened = True
        self._client.start_weight_update()
        with torch.accelerator.device_index(self._sender.device.index):
            for chunk in packed_ipc_producer(
                iterator=device_tensors(snapshot, self._sender.device),
                gpu_uuid=self._sender.device_id,
                post_iter_func=lambda item: item[1],
                buffer_size_bytes=_largest(snapshot),
            ):
                handle = {name: plain_handle(args) for name, args in chunk.ipc_handle.items()}
                self._client.update_weights(
                    {
                        "names": chunk.names,
                        "dtype_names": chunk.dtype_names,
                        "shapes": chunk.shapes,
                        "tensor_sizes": chunk.tensor_sizes,
                        "ipc_handles": handle,
                    }
                )
            self._client.finish_weight_update()
            torch.cuda.ipc_collect()

    def close(self) -> None:
        """Nothing outlives an update."""


def _largest(snapshot: WeightsSnapshot) -> int:
    """Bytes of the buffer: a bucket, or the one parameter that is larger."""
    sizes = (tensor_bytes(meta) for bucket in snapshot.buckets for meta in bucket.tensors)
    return max(BUCKET_BYTES, *sizes)
