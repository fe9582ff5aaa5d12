"""Whether a folder's weights are those of its config, from their heads and a sample of values."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from async_grpo.model.folder import read_config
from async_grpo.model.slices import Files, files_of, outline
from async_grpo.util.errors import ModelError

MAX_VALUES = 1 << 20  # that are looked at of each tensor
LAYER = re.compile(r"\.\d+\.")


def check_weights(path: str, *, seconds: float) -> str:
    """A sentence on tensors that the config has no use for; empty: there are none.

    Values are looked at for so many `seconds`. Raises `ModelError` for weights that are missing, of
    another shape, of more layers than the config's, or not finite.
    """
    files = files_of(Path(path))
    if not files:  # pytorch_model.bin tells nothing before it is loaded
        return ""
    model = outline(read_config(Path(path)), attention="eager", dtype=torch.float32)
    wanted = {name: list(each.shape) for name, each in model.named_parameters()}
    if wanted.keys().isdisjoint(files):  # names of older times, which transformers translates
        return ""
    part = f"{model.base_model_prefix}."
    if absent := [n for n in wanted if n not in files and n.removeprefix(part) not in files]:
        raise ModelError(
            f"the weights in {path} must hold every parameter of its config, {len(absent)} of "
            f"{len(wanted)} are missing, first {absent[0]}: complete the folder, or correct it"
        )
    known = {*wanted, *dict(model.named_buffers()), *model.all_tied_weights_keys}
    extra = [name for name in files if name not in known]
    layers = {LAYER.sub(".N.", name) for name in wanted}
    if more := [name for name in extra if LAYER.sub(".N.", name) in layers]:
        raise ModelError(
            f"the weights in {path} must be of as many layers as its config says, {len(more)} "
            f"tensors are of more, first {more[0]}: correct num_hidden_layers in config.json"
        )
    _check_values(files, wanted, until=time.monotonic() + seconds)
    told = f"{len(extra)} tensors of {path} are of no use to its config, first"
    return f"{told} {extra[0]}: see that config.json is that of these weights" if extra else ""


def _check_values(files: Files, wanted: Mapping[str, list[int]], *, until: float) -> None:
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118
                _check_tensor(name, file, content.get_slice(name), wanted.get(name), until=until)


def _check_tensor(
    name: str, file: Path, tensor: Any, wanted: list[int] | None, *, until: float
) -> None:
    shape = tensor.get_shape()
    if wanted not in (None, shape):
        raise ModelError(
            f"{name} in {file} must have the shape that config.json gives it ({wanted}), it has "
            f"{shape}: give the model its own config"
        )
    rows = max(1, MAX_VALUES // max(1, math.prod(shape[1:])))
    if shape and time.monotonic() < until and not tensor[:rows].isfinite().all():
        raise ModelError(f"{name} in {file} must be finite, it holds NaN: take other weights")
