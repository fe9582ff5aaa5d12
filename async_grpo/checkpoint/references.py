"""The weights of a reference that has moved, in a checkpoint and out of it.

They are written as they were served: `reference_12_00001.safetensors` holds some of the parameters
after batch 12, in the type in which the workers got them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from async_grpo.checkpoint.shards import write_shards
from async_grpo.types import WeightsSnapshot
from async_grpo.weight_sync.links import device_tensors

SHARD_BYTES = 1 << 30


def save_references(snapshots: Iterable[WeightsSnapshot], folder: Path) -> None:
    """Write each snapshot to files of its own. Raises `CheckpointError` when the disk refuses."""
    for snapshot in snapshots:
        prefix = _prefix(snapshot.version.batches)
        gathered = device_tensors(snapshot, torch.device("cpu"))
        tensors = ((prefix + name, tensor) for name, tensor in gathered)
        for _ in write_shards(tensors, folder, stem=prefix.rstrip("."), max_bytes=SHARD_BYTES):
            pass


def read_reference(folder: Path, batches: int) -> Iterator[tuple[str, Tensor]]:
    """The parameters after `batches`, one at a time, under their checkpoint names."""
    prefix = _prefix(batches)
    for file in sorted(folder.glob(f"{prefix.rstrip('.')}_*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a mapping
                yield name.removeprefix(prefix), tensors.get_tensor(name)


def _prefix(batches: int) -> str:
    return f"reference_{batches}."
