"""The weights of a reference that has moved, in a checkpoint and out of it.

They are written as they were served, bucket by bucket: `reference_12_00001.safetensors` holds some
of the parameters after batch 12, in the type in which the workers got them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from async_grpo import cluster, deadlines
from async_grpo.errors import CheckpointError
from async_grpo.types import WeightsSnapshot
from async_grpo.weight_sync.buckets import unpack_bucket


def save_references(snapshots: Iterable[WeightsSnapshot], folder: Path) -> None:
    """Write each snapshot's buckets to files of their own; one is in memory at a time.

    Raises `CheckpointError` when the disk refuses.
    """
    for snapshot in snapshots:
        for number, bucket in enumerate(snapshot.buckets, 1):
            data = cluster.wait(
                bucket.data, timeout_s=deadlines.BUCKET_FETCH_S, who="the object store"
            )
            prefix = _prefix(snapshot.version.batches)
            tensors = {prefix + name: tensor for name, tensor in unpack_bucket(bucket, data)}
            file = folder / f"{prefix.rstrip('.')}_{number:05}.safetensors"
            try:
                save_file(tensors, file)
            except Exception as error:  # safetensors raises what its Rust side makes of the disk's
                raise CheckpointError(f"{file.name} could not be written: {error}") from error


def read_reference(folder: Path, batches: int) -> Iterator[tuple[str, Tensor]]:
    """The parameters after `batches`, one at a time, under their checkpoint names."""
    prefix = _prefix(batches)
    for file in sorted(folder.glob(f"{prefix.rstrip('.')}_*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a mapping
                yield name.removeprefix(prefix), tensors.get_tensor(name)


def _prefix(batches: int) -> str:
    return f"reference_{batches}."
