"""The policy as a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from async_grpo.files import sync
from async_grpo.model.policy import PolicyModel
from async_grpo.training.fsdp import iter_full_tensors

SHARD_BYTES = 4 << 30  # rank 0 holds one file's worth of weights at a time
# Config, tokenizer, templates, licence.
COPIED_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".tiktoken")
INDEX_NAME = "model.safetensors.index.json"


def export_hf(policy: PolicyModel, *, source_folder: str, target: str) -> str:
    """Write `target`, whole or not at all; collective, and complete on return on every rank.

    Weights take the type that the source's config.json names, float32 where it names none; a tied
    head is not repeated. Config, generation config and tokenizer are the source's files. An older
    folder at `target` is replaced. Returns on every rank why a disk refused, empty if none did.
    """
    tensors = iter_full_tensors(policy)
    reason = [""]
    if _is_writer():
        try:
            _write(tensors, Path(source_folder), Path(target))
        except (OSError, SafetensorError) as error:
            reason = [str(error)]
    for _ in tensors:  # gathered by all ranks, to the last, whatever has become of the writer
        pass
    if dist.is_initialized():
        dist.broadcast_object_list(reason, src=0)
    return reason[0]


def _write(tensors: Iterable[tuple[str, Tensor]], source: Path, goal: Path) -> None:
    temporary = goal.with_name(f".{goal.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _copy_descriptions(source, temporary)
        _write_weights(tensors, temporary, dtype=_stored_dtype(source))
        _sync_to_disk(temporary)
        _replace_folder(temporary, goal)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # the next file may need its room


def _is_writer() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _stored_dtype(source: Path) -> torch.dtype:
    config = json.loads((source / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return getattr(torch, name)


def _copy_descriptions(source: Path, folder: Path) -> None:
    for file in sorted(source.iterdir()):
        is_index = file.name.endswith(".index.json")
        if file.is_file() and file.suffix in COPIED_SUFFIXES and not is_index:
            shutil.copyfile(file, folder / file.name)


def _write_weights(
    tensors: Iterable[tuple[str, Tensor]], folder: Path, *, dtype: torch.dtype
) -> None:
    """One safetensors file, or several with an index, never more than one of them in memory."""
    index: dict[str, str] = {}
    shards = [
        _write_shard(shard, folder / f"shard-{number}.partial")
        for number, shard in enumerate(_shards(tensors, dtype))
    ]
    total = len(shards)
    for number, (file, names) in enumerate(shards, 1):
        name = "model.safetensors" if total == 1 else f"model-{number:05}-of-{total:05}.safetensors"
        file.rename(folder / name)
        index |= dict.fromkeys(names, name)
    if total > 1:
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _write_shard(shard: dict[str, Tensor], file: Path) -> tuple[Path, list[str]]:
    save_file(shard, file, metadata={"format": "pt"})
    return file, list(shard)


def _shards(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """Whole parameters in their order, cut wherever another one would exceed `SHARD_BYTES`."""
    shard: dict[str, Tensor] = {}
    size_bytes = 0
    for name, tensor in tensors:
        converted = tensor.to(dtype).contiguous()
        if shard and size_bytes + converted.nbytes > SHARD_BYTES:
            yield shard
            shard, size_bytes = {}, 0
        shard[name] = converted
        size_bytes += converted.nbytes
    yield shard


def _sync_to_disk(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        sync(path)


def _replace_folder(new: Path, goal: Path) -> None:
    """Rename `new` to `goal`; what stood there is moved aside first and then removed."""
    old = goal.with_name(f".{goal.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if goal.exists():
        goal.rename(old)
    new.rename(goal)
    sync(goal.parent)
    shutil.rmtree(old, ignore_errors=True)
