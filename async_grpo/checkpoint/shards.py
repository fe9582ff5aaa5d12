"""Parameters as safetensors files, one after the other, so that few are in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from async_grpo.util.errors import CheckpointError


def write_shards(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, *, stem: str, max_bytes: int
) -> Iterator[tuple[Path, list[str]]]:
    """Write `STEM_00001.safetensors` and so on; gives each file with the names of its parameters.

    One file's are in memory at a time, at most `max_bytes` or a single parameter.
    Raises `CheckpointError` when the disk refuses.
    """
    for number, shard in enumerate(cut_by_size(tensors, max_bytes), 1):
        file = folder / f"{stem}_{number:05}.safetensors"
        try:
            save_file(shard, file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file.name} could not be written: {error}") from error
        yield file, list(shard)


def cut_by_size(
    tensors: Iterable[tuple[str, Tensor]], max_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """Whole parameters in their order, cut wherever another one would exceed `max_bytes`."""
    shard: dict[str, Tensor] = {}
    size_bytes = 0
    for name, tensor in tensors:
        if shard and size_bytes + tensor.nbytes > max_bytes:
            yield shard
            shard, size_bytes = {}, 0
        shard[name] = tensor
        size_bytes += tensor.nbytes
    if shard:
        yield shard
