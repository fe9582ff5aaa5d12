"""Filling a model from its safetensors files, each rank with the slices that it holds.

    outline ─▶ shard ─▶ materialise ─▶ fill
    (shapes, no memory)  (memory for this rank's shards, no values)

No process ever holds the whole model: at most its shards, and one parameter of a file.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from async_grpo.model.policy import PolicyModel, hf_named_parameters
from async_grpo.util.errors import ModelError

Files = dict[str, Path]  # by the name of a tensor


def outline(config: PreTrainedConfig, *, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model with parameters that are a shape alone; buffers, which few files hold, are real."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    return model


def materialise(policy: PolicyModel, device: torch.device, *, parameters_on: torch.device) -> None:
    """Memory for what has none yet, without values; buffers move to `device` as they are."""
    policy._apply(  # as `to_empty`, which would wipe the buffers
        lambda tensor: (
            torch.empty_like(tensor, device=parameters_on) if tensor.is_meta else tensor.to(device)
        )
    )


def files_of(folder: Path) -> Files:
    """Where each tensor lies; empty without safetensors files.

    Raises ModelError when a file that the index names is not there.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        places = json.loads(index.read_text())["weight_map"]
        if lost := [file for file in sorted(set(places.values())) if not (folder / file).is_file()]:
            raise ModelError(
                f"{folder} must hold every file that {index.name} names, {len(lost)} are not "
                f"there, first {lost[0]}: finish the download"
            )
        return {name: folder / file for name, file in places.items()}
    file = folder / SAFE_WEIGHTS_NAME
    if not file.is_file():
        return {}
    with safe_open(file, framework="pt") as content:
        return dict.fromkeys(content.keys(), file)


def misfit(policy: PolicyModel, files: Files) -> str:
    """Why the files cannot fill the outlined policy name by name; empty if they can."""
    if not files:
        return f"there is no {SAFE_WEIGHTS_NAME}"
    needed = [name for name, _ in hf_named_parameters(policy)]
    if absent := [name for name in needed if name not in files]:
        return f"{len(absent)} of {len(needed)} parameters have other names, first {absent[0]}"
    return ""


@torch.no_grad()
def fill(policy: PolicyModel, files: Files) -> None:
    """Give every parameter its values, converted to its type; each rank reads its own slices.

    Raises ModelError when a tensor has another shape than its parameter, or when the config ties
    parameters that the files hold as two.
    """
    own = dict(hf_named_parameters(policy))
    for name, parameter in own.items():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        read_into(local, parameter, name, files[name])
    for name, buffer in policy.model.named_buffers():
        if name in files:
            read_into(buffer, buffer, name, files[name])
    for name, source in policy.model.all_tied_weights_keys.items():
        if name in files and name not in own:
            _check_tie(own[source], name, source, files[name])


def read_into(target: Tensor, whole: Tensor, name: str, file: Path) -> None:
    """Copy this rank's slice of tensor `name` into `target`, its shard of `whole`."""
    # Opened for one tensor only: the pages of an open file count as this process's memory.
    with safe_open(file, framework="pt") as content:
        source = content.get_slice(name)
        if source.get_shape() != list(whole.shape):
            raise ModelError(
                f"{name} in {file} must have the shape that config.json gives it "
                f"({list(whole.shape)}), it has {source.get_shape()}: give the model its own config"
            )
        if target.numel():  # with more ranks than rows some have none
            target.copy_(source[_slices(whole)] if whole.ndim else content.get_tensor(name))


def _slices(whole: Tensor) -> tuple[slice, ...]:
    if not isinstance(whole, DTensor):
        return tuple(slice(0, size) for size in whole.shape)
    shape, offset = compute_local_shape_and_global_offset(
        whole.shape, whole.device_mesh, whole.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _check_tie(parameter: Tensor, name: str, source: str, file: Path) -> None:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    stored = torch.empty_like(local)
    read_into(stored, parameter, name, file)
    if not torch.equal(stored, local):
        raise ModelError(
            f"config.json ties {name} to {source}, but {file.parent} holds two that differ: set "
            "tie_word_embeddings to false there, or remove one of the two"
        )
