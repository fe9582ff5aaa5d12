"""The safetensors files of a model: ranks fill their shards from them, `check` inspects them.

    outline ─▶ shard ─▶ materialise ─▶ fill
    (shapes, no memory)  (memory for this rank's shards, no values)

No process ever holds the whole model, but its shards and at most one parameter of a file.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from async_grpo.model.foreign_folders import config_file
from async_grpo.model.model_folder import read_config
from async_grpo.model.policy import PolicyModel, as_stored, hf_named_parameters
from async_grpo.model.text_towers import is_tower, text_name
from async_grpo.util.errors import UnfitModel

Files = dict[str, Path]  # by the name of a tensor
Place = tuple[Path, str]  # a tensor's file, and its name there
Named = Iterator[tuple[str, Tensor]]
MAX_VALUES = 1 << 20  # of each tensor that `check_weights` reads
FIRST_EXPERT = ".experts.0."
LAYER = re.compile(r"\.\d+\.")


def outline(config: PreTrainedConfig, *, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model with meta parameters; buffers have values, since few files hold them."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    return model


def materialise(policy: PolicyModel, device: torch.device, *, parameters_on: torch.device) -> None:
    """Allocate meta parameters, without values; move buffers, with theirs, to `device`."""
    policy._apply(  # as `to_empty`, which would lose the buffers' values
        lambda tensor: (
            torch.empty_like(tensor, device=parameters_on) if tensor.is_meta else tensor.to(device)
        )
    )


def files_of(folder: Path) -> Files:
    """{name of a tensor: its file}; empty without safetensors files.

    Raises UnfitModel when a file that the index names does not exist.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        places = json.loads(index.read_text())["weight_map"]
        if lost := [file for file in sorted(set(places.values())) if not (folder / file).is_file()]:
            raise UnfitModel(
                f"{folder} must hold every file that {index.name} names, {len(lost)} are not "
                f"there, first {lost[0]}: finish the download"
            )
        return {name: folder / file for name, file in places.items()}
    file = folder / SAFE_WEIGHTS_NAME
    if not file.is_file():
        return {}
    with safe_open(file, framework="pt") as content:
        return dict.fromkeys(content.keys(), file)


def places_of(folder: Path) -> dict[str, Place]:
    """{name that the text model has of a tensor: its place}, without tensors of other parts."""
    files, own = files_of(folder), text_name if is_tower(config_file(folder)) else str
    return {own(name): (file, name) for name, file in files.items() if own(name)}


def tensors_in(folder: Path, *, among: Collection[str] | None = None) -> Named:
    """The text model's tensors, of these names alone if some are given, one at a time."""
    places = places_of(folder)
    for name in places if among is None else places.keys() & among:
        file, stored = places[name]
        with safe_open(file, framework="pt") as content:
            yield name, content.get_tensor(stored)


def put_back(tensors: Named, folder: Path) -> Named:
    """The text model's tensors by the names of a folder's files, and its others as they are."""
    if not is_tower(config_file(folder)):
        yield from tensors
        return
    places = places_of(folder)
    yield from ((places[name][1], tensor) for name, tensor in tensors)
    for name, file in files_of(folder).items():
        if not text_name(name):
            with safe_open(file, framework="pt") as content:
                yield name, content.get_tensor(name)


def misfit(policy: PolicyModel, places: Mapping[str, Place]) -> str:
    """Why the files cannot fill the outlined policy name by name; empty if they can."""
    if not places:
        return f"there is no {SAFE_WEIGHTS_NAME}"
    needed: list[str] = []
    for name, parameter in hf_named_parameters(policy):
        stored = as_stored(policy.model, name, parameter)
        if len(stored) == 1 and {each.shape for each in stored.values()} != {parameter.shape}:
            return f"{name} is stored in another form"
        needed += stored
    if absent := [name for name in needed if name not in places]:
        return f"{len(absent)} of {len(needed)} parameters have other names, first {absent[0]}"
    return ""


@torch.no_grad()
def fill(policy: PolicyModel, places: Mapping[str, Place]) -> None:
    """Set every parameter, converted to its type; each rank reads the slices of its shards.

    Raises UnfitModel when a tensor has another shape than its parameter, or when the config ties
    parameters of which the files hold different values.
    """
    own = dict(hf_named_parameters(policy))
    for name, parameter in own.items():
        _fill_one(policy.model, name, parameter, places)
    for name, buffer in policy.model.named_buffers():
        for stored, part in as_stored(policy.model, name, buffer).items():
            if stored in places:
                read_into(part, part, places[stored])
    for name, source in policy.model.all_tied_weights_keys.items():
        if name in places and name not in own:
            _check_tie(own[source], name, source, places[name])


def _fill_one(
    model: PreTrainedModel, name: str, parameter: Tensor, places: Mapping[str, Place]
) -> None:
    local, whole = local_part(parameter), torch.empty(parameter.shape, device="meta")
    stored = [*as_stored(model, name, whole)]
    if len(stored) == 1:
        read_into(local, parameter, places[stored[0]])
        return
    first = slices_of(parameter)[0].start
    for number, expert in enumerate(local):  # a view, as are its parts
        for part, view in as_stored(model, name, expert[None]).items():
            own = part.replace(FIRST_EXPERT, f".experts.{first + number}.")
            read_into(view, view, places[own])


def read_into(target: Tensor, whole: Tensor, place: Place) -> None:
    """Copy this rank's slice of a file's tensor into `target`, its shard of `whole`."""
    file, name = place
    # Opened for one tensor only: the pages of an open file count as this process's memory.
    with safe_open(file, framework="pt") as content:
        source = content.get_slice(name)
        if source.get_shape() != list(whole.shape):
            raise _misshapen(name, file, whole, source.get_shape())
        if target.numel():  # with more ranks than rows some have none
            target.copy_(source[slices_of(whole)] if whole.ndim else content.get_tensor(name))


def read_whole(place: Place, like: Tensor) -> Tensor:
    """A file's tensor, as `read_into` takes a slice of it."""
    file, name = place
    with safe_open(file, framework="pt") as content:
        found = content.get_tensor(name)
    if found.shape != like.shape:
        raise _misshapen(name, file, like, [*found.shape])
    return found


def _misshapen(name: str, file: Path, whole: Tensor, found: list[int]) -> UnfitModel:
    return UnfitModel(
        f"{name} in {file} must have the shape that config.json gives it ({[*whole.shape]}), it "
        f"has {found}: give the model its own config"
    )


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, which shares its memory; else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def own_rows(tensor: Tensor) -> Tensor:
    """This rank's rows, in its memory, of a tensor that all ranks hold; a sharded one as it is."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim == 1:
        return tensor
    mesh, whole = tensor.device_mesh, tensor.to_local()
    if mesh.size(-1) > 1:
        return tensor
    assert mesh.mesh_dim_names
    ranks = mesh[mesh.mesh_dim_names[0]]
    rows = Shard(0)
    size, start = rows.local_shard_size_and_offset(len(whole), ranks.size(), ranks.get_local_rank())
    return DTensor.from_local(
        whole[start : start + size], ranks, (rows,),
        run_check=False, shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip


def as_shard_of(local: Tensor, other: Tensor, *, shape: torch.Size | None = None) -> Tensor:
    """`local` as this rank's shard of a tensor of `shape` that is sharded as `other` is.

    None: of its shape, too.
    """
    if not isinstance(other, DTensor):
        return local
    whole = torch.empty(shape or other.shape, device="meta")
    return DTensor.from_local(
        local, other.device_mesh, other.placements, run_check=False, shape=whole.shape,
        stride=whole.stride(),
    )  # fmt: skip


def slices_of(whole: Tensor) -> tuple[slice, ...]:
    """What this rank holds of a sharded tensor; of another, all."""
    if not isinstance(whole, DTensor):
        return tuple(slice(0, size) for size in whole.shape)
    shape, offset = compute_local_shape_and_global_offset(
        whole.shape, whole.device_mesh, whole.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _check_tie(parameter: Tensor, name: str, source: str, place: Place) -> None:
    local = local_part(parameter)
    stored = torch.empty_like(local)
    read_into(stored, parameter, place)
    if not torch.equal(stored, local):
        raise UnfitModel(
            f"config.json ties {name} to {source}, but {place[0].parent} holds two that differ: "
            "set tie_word_embeddings to false there, or remove one of the two"
        )


def check_weights(path: str, *, seconds: float) -> str:
    """A sentence about tensors that the config does not use; empty without such tensors.

    Values are read for at most `seconds`. Raises `UnfitModel` for weights that are missing, have
    another shape, belong to more layers than the config has, or are not finite.
    """
    places = places_of(Path(path))
    if not places:  # names in pytorch_model.bin are unknown before it is loaded
        return ""
    model = outline(read_config(Path(path)), attention="eager", dtype=torch.float32)
    wanted = {
        stored: list(part.shape)
        for name, each in model.named_parameters()
        for stored, part in as_stored(model, name, each).items()
    }
    if wanted.keys().isdisjoint(places):  # old names, which transformers translates
        return ""
    part = f"{model.base_model_prefix}."
    if absent := [n for n in wanted if n not in places and n.removeprefix(part) not in places]:
        raise UnfitModel(
            f"the weights in {path} must hold every parameter of its config, {len(absent)} of "
            f"{len(wanted)} are missing, first {absent[0]}: complete the folder, or correct it"
        )
    known = {*wanted, *dict(model.named_buffers()), *model.all_tied_weights_keys}
    extra = [name for name in places if name not in known]
    layers = {LAYER.sub(".N.", name) for name in wanted}
    if more := [name for name in extra if LAYER.sub(".N.", name) in layers]:
        raise UnfitModel(
            f"the weights in {path} must be of as many layers as its config says, {len(more)} "
            f"tensors are of more, first {more[0]}: correct num_hidden_layers in config.json"
        )
    until = time.monotonic() + seconds
    for name, (file, stored) in places.items():
        with safe_open(file, framework="pt") as content:
            _check_tensor(name, file, content.get_slice(stored), wanted.get(name), until=until)
    unused = f"{len(extra)} tensors of {path} are of no use to its config, first"
    return f"{unused} {extra[0]}: see that config.json is that of these weights" if extra else ""


def _check_tensor(
    name: str, file: Path, tensor: Any, wanted: list[int] | None, *, until: float
) -> None:
    shape = tensor.get_shape()
    if wanted not in (None, shape):
        raise UnfitModel(
            f"{name} in {file} must have the shape that config.json gives it ({wanted}), it has "
            f"{shape}: give the model its own config"
        )
    rows = max(1, MAX_VALUES // max(1, math.prod(shape[1:])))
    if shape and time.monotonic() < until and not tensor[:rows].isfinite().all():
        raise UnfitModel(f"{name} in {file} must be finite, it holds NaN: take other weights")
