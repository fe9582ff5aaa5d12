"""Writes a folder of FP8 or MXFP4 weights out in bf16, or rounds one, one tensor at a time.

transformers can load both so (`FineGrainedFP8Config(dequantize=True)`, `Mxfp4Config`), but holds
the whole model, and derives a block's size from the number of scales: it refuses a matrix whose
last block is cut (DeepSeek's kv_a_proj_with_mqa), or takes smaller blocks. Here the config says it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from async_grpo.checkpoint.export import write_folder
from async_grpo.model.foreign_folders import (
    can_dequantize,
    check_full_precision,
    config_file,
    quantization_of,
)
from async_grpo.model.model_folder import read_config
from async_grpo.model.packed_linear import library, rounded
from async_grpo.model.policy import PolicyModel, as_stored
from async_grpo.model.weight_files import (
    Files,
    Named,
    files_of,
    outline,
    places_of,
    put_back,
    tensors_in,
)
from async_grpo.util.errors import CheckpointError, ConfigError, UnfitModel

Block = tuple[int, int]  # rows and columns of a matrix that share a scale
FP8_BLOCK = (128, 128)  # of transformers' config, where a folder's own says none
BLOCKS, SCALES = "_blocks", "_scales"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WHOLE = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool)  # kept as they are
# Of activations and caches, which are computed in bf16 from now on.
NOT_OF_WEIGHTS = re.compile(r"(^|[._])((input|output|activation)_scale(_ub|_inv)?|[qkv]_scale)$")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1])  # [16] by the four bits


def dequantize(source: Path, target: Path) -> int:
    """Write the folder `target`, whole or not at all; returns how many weights were quantised.

    Raises `UnfitModel` for weights in another format, `ConfigError` for a folder that is there, one
    that is not quantised, or a disk that fails.
    """
    found = quantization_of(source)
    if not found:
        raise ConfigError(f"IN must be quantised, {source} is not: use it as it is")
    if not can_dequantize(found):
        check_full_precision(source)
    _check_absent(target)
    files = files_of(source)
    scales = _scales(files)
    if not scales:
        raise UnfitModel(
            f"quantised weights must have their scales beside them, {source} has none: fetch its "
            "*.safetensors again"
        )
    config = json.dumps(_full_precision(config_file(source)), indent=2) + "\n"
    tensors = _dequantized(files, scales, block=block_of(found))
    _write(tensors, source, target, texts={"config.json": config})
    return len(scales)


def quantize(source: Path, target: Path, kind: str) -> int:
    """Write a folder whose linear layers hold what `kind` can say; returns how many do.

    These are the layers of adapters on all-linear. Types and names stay. Raises as `dequantize`.
    """
    check_full_precision(source)
    _check_absent(target)
    library()
    policy = PolicyModel(outline(read_config(source), attention="eager", dtype=torch.float32))
    head = policy.model.get_output_embeddings()
    linear = {
        stored
        for path, layer in policy.model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
        for stored in as_stored(policy.model, f"{path}.weight", layer.weight)
    }
    if absent := sorted(linear - places_of(source).keys()):
        raise UnfitModel(
            "weights to round must be in safetensors by the names of save_pretrained, "
            f"{len(absent)} are not in {source}, first {absent[0]}: write it with save_pretrained"
        )
    named = tensors_in(source)
    tensors = ((name, rounded(each, kind) if name in linear else each) for name, each in named)
    _write(put_back(tensors, source), source, target, texts={})
    return len(linear)


def _check_absent(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise ConfigError(f"OUT must not exist, {target} does: name another folder")


def _write(tensors: Named, source: Path, target: Path, *, texts: Mapping[str, str]) -> None:
    try:
        write_folder(tensors, source, target, texts=texts)
    except (OSError, CheckpointError) as error:
        raise ConfigError(
            f"cannot write {target} ({error}): free space, or name another"
        ) from error


def _full_precision(config: Mapping[str, object], *, is_part: bool = False) -> dict[str, object]:
    """The config of the same model in bf16, and of its parts (`text_config`)."""
    dropped = ("quantization_config", "compression_config", "torch_dtype")
    kept = {name: value for name, value in config.items() if name not in dropped}
    for name, value in kept.items():
        if name.endswith("_config") and isinstance(value, dict):
            kept[name] = _full_precision(value, is_part=True)
    return kept if is_part else kept | {"dtype": "bfloat16"}


def block_of(found: Mapping[str, Any]) -> Block:
    """The block that a quantization_config names; all of a matrix where it names none (null).

    >>> block_of({"quant_method": "fp8", "weight_block_size": [64, 32]})
    (64, 32)
    """
    if found.get("quant_method") == "compressed-tensors":
        groups = [each.get("weights") or {} for each in found.get("config_groups", {}).values()]
        blocks = [each["block_structure"] for each in groups if each.get("block_structure")]
        stated = blocks[0] if blocks else FP8_BLOCK
    else:
        is_mx = found.get("quant_method") == "mxfp8"
        stated = found.get("weight_block_size", (1, 32) if is_mx else FP8_BLOCK) or FP8_BLOCK
    rows, columns = map(int, stated.split("x") if isinstance(stated, str) else stated)
    return rows, columns


def _scales(files: Files) -> dict[str, str]:
    """{name of a quantised weight: that of its scales}."""
    found = {}
    for name in files:
        for end, weight_end in (
            ("_scale_inv", ""),
            ("_scale", ""),
            (SCALES, BLOCKS),
            (".scale", ".weight"),
        ):
            weight = name.removesuffix(end) + weight_end
            if name.endswith(end) and weight in files:
                found[weight] = name
    return found


def _dequantized(
    files: Files, scales: Mapping[str, str], *, block: Block
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the model in full precision; a name and its scales are in memory."""
    used = {*scales.values(), *filter(NOT_OF_WEIGHTS.search, files)}
    for name in sorted(files.keys() - used, key=lambda name: (files[name], name)):
        tensor = _read(name, files)
        if name not in scales:
            if tensor.dtype not in WHOLE:
                raise UnfitModel(
                    f"weights must be FP8 or MXFP4 with their scales, {name} in {files[name]} is "
                    f"{tensor.dtype} without: use the full-precision model"
                )
            yield name, tensor
            continue
        is_mxfp4 = name.endswith(BLOCKS) and tensor.dtype == torch.uint8
        own = _read(scales[name], files)
        try:
            whole = from_mxfp4(tensor, own) if is_mxfp4 else from_fp8(tensor, own, block=block)
        except ValueError as error:
            raise UnfitModel(
                f"{name} in {files[name]} cannot be dequantised, {error}: use the full-precision "
                "model"
            ) from None
        yield name.removesuffix(BLOCKS) if is_mxfp4 else name, whole


def _read(name: str, files: Files) -> Tensor:
    # Opened for one tensor only: the pages of an open file count as this process's memory.
    with safe_open(files[name], framework="pt") as content:
        return content.get_tensor(name)


def from_fp8(weight: Tensor, scale: Tensor, *, block: Block) -> Tensor:
    """`weight` times its scales in float32, then bf16.

    `weight` [..., R, C] float8; `scale` one number, [..., R] or [..., R, 1], or one a block:
    [..., ⌈R / block rows⌉, ⌈C / block columns⌉], of which the last may be cut; uint8 is a power of
    two, 2^(byte − 127). This is `weight_dequant` of DeepSeek-V3 (inference/kernel.py), and
    `Fp8Dequantize._dequantize_one` of transformers/integrations/finegrained_fp8.py.

    Raises `ValueError` for other types and shapes, and for results that are not finite.

    >>> weight = torch.ones(2, 3).to(torch.float8_e4m3fn)
    >>> from_fp8(weight, torch.tensor([[2.0, 3.0]]), block=(2, 2)).tolist()
    [[2.0, 2.0, 3.0], [2.0, 2.0, 3.0]]
    """
    if weight.dtype not in FP8:
        raise ValueError(f"it is {weight.dtype}")
    if weight.ndim > 2:  # experts, one at a time
        own = scale.reshape(1).expand(len(weight)) if scale.numel() == 1 else scale
        return torch.stack([from_fp8(*each, block=block) for each in zip(weight, own, strict=True)])
    factors = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    rows, columns = weight.shape[0], weight[0].numel()
    if factors.numel() == 1:
        factors = factors.reshape(())
    elif factors.shape in ((rows,), (rows, 1)):
        factors = factors.reshape(rows, *[1] * (weight.ndim - 1))
    elif factors.shape == (ceil(rows / block[0]), ceil(columns / block[1])):
        factors = factors.repeat_interleave(block[0], 0)[:rows]
        factors = factors.repeat_interleave(block[1], 1)[:, :columns]
    else:
        raise ValueError(f"{list(weight.shape)} has scales {list(scale.shape)} for blocks {block}")
    return _finite((weight.float() * factors).to(torch.bfloat16))


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The experts' matrices [E, C, R] bf16, transposed as transformers' gpt-oss has them.

    `blocks` [E, R, G, 16] uint8: two E2M1 numbers a byte, the low four bits first, so that
    C = 32 G; `scales` [E, R, G] uint8: 2^(byte − 127). Exact in bf16. This is
    `_convert_moe_packed_tensors` of transformers/integrations/mxfp4.py, from gpt-oss' own
    torch/weights.py, and OCP's MX specification 1.0.

    Raises `ValueError` for other shapes, and for a scale of 255, which is NaN.
    """
    if blocks.ndim != 4 or blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16:
        raise ValueError(f"its blocks are {list(blocks.shape)}, its scales {list(scales.shape)}")
    experts, rows, groups, _ = blocks.shape
    whole = torch.empty(experts, groups * 32, rows, dtype=torch.bfloat16)
    for goal, packed, exponents in zip(whole, blocks.int(), scales.int() - 127, strict=True):
        values = torch.stack([E2M1[packed & 15], E2M1[packed >> 4]], dim=-1).flatten(-2)
        goal.copy_(torch.ldexp(values, exponents[..., None]).reshape(rows, -1).T)
    return _finite(whole)


def _finite(tensor: Tensor) -> Tensor:
    if not tensor.isfinite().all():
        raise ValueError("it holds NaN or infinity")
    return tensor
