"""Whether a folder's weights are those of its config, from their heads and a sample of values."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from async_grpo.errors import ModelError
from async_grpo.model.folder import read_config
from async_grpo.model.slices import files_of, outline

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
    known = {*wanted, *dict(model.named_buffers()), *model.all_tied_weights_keys}
    _check_names(path, wanted, files, prefix=model.base_model_prefix)
    extra = [name for name in files if name not in known]
    layers = {LAYER.sub(".N.", name) for name in wanted}
    if more := [name for name in extra if wanted.keys() & files.keys() and (
            LAYER.sub(".N.", name) in layers)]:  # fmt: skip
        raise ModelError(
            f"the weights in {path} must be of as many layers as its config says, {len(more)} "
            f"tensors are of more, first {more[0]}: correct num_hidden_layers in config.json"
        )
    _check_values(files, wanted, until=time.monotonic() + seconds)
    if not extra or not wanted.keys() & files.keys():
        return ""
    return (
        f"{len(extra)} tensors of {path} are of no use to its config, first {extra[0]}: see that "
        "config.json is that of these weights"
    )


def _check_names(
    path: str, wanted: Mapping[str, object], files: Mapping[str, Path], *, prefix: str
) -> None:
    """Raise for tensors that are not there, nor under the name of a part without the head."""
    absent = [
        name
        for name in wanted
        if name not in files and name.removeprefix(f"{prefix}.") not in files
    ]
    if absent and any(name in files for name in wanted):  # else they have names of older times
        raise ModelError(
            f"the weights in {path} must hold every parameter of its config, {len(absent)} of "
            f"{len(wanted)} are missing, first {absent[0]}: complete the folder, or correct "
            "config.json"
        )


def _check_values(
    files: Mapping[str, Path], wanted: Mapping[str, list[int]], *, until: float
) -> None:
    for name, file, tensor in _tensors(files):
        shape = tensor.get_shape()
        if shape != wanted.get(name, shape):
            raise ModelError(
                f"{name} in {file} must have the shape that config.json gives it ({wanted[name]}), "
                f"it has {shape}: give the model its own config"
            )
        if not shape or time.monotonic() > until:
            continue
        rows = max(1, MAX_VALUES * shape[0] // max(1, torch.Size(shape).numel()))
        if not tensor[:rows].isfinite().all():
            raise ModelError(f"{name} in {file} must be finite, it holds NaN: take other weights")


def _tensors(files: Mapping[str, Path]) -> Iterator[tuple[str, Path, Any]]:
    """(name, file, slices of it), file by file, each opened once."""
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118
                yield name, file, content.get_slice(name)
