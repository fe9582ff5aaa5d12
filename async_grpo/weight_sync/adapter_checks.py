"""What a worker checks of an adapter: that vLLM computes with the numbers that the trainer has.

vLLM places an adapter by the names in its file, and leaves a layer that it finds no name for as the
base has it, without a word: such a run looks alive and learns nothing. So the buffers that vLLM
multiplies by are read back after each load. Runs inside vLLM's engine core processes.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper import punica_cpu
from vllm.lora.utils import parse_fine_tuned_lora_name

from async_grpo.types import WeightSample
from async_grpo.weight_sync.update_checks import NUM_READ, common

ADAPTER_FILE = "adapter_model.safetensors"  # as peft and vLLM call it
FLOAT32_STEP = 2.0**-22  # relative: more than a product and a quotient in float32 are off by
Shape = tuple[int, ...]


class _Part(NamedTuple):
    """One of vLLM's buffers with rows and columns of a tensor, which several may hold."""

    buffer: Tensor  # [adapters, 1, R, C]
    rows: Tensor  # [R] int64, of the tensor; -1: of none
    columns: Tensor  # [C]


class AdapterReadback:
    """The adapters of one process, as its kernels read them."""

    def __init__(self, manager: LoRAModelManager) -> None:
        self._manager = manager
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        self._mapper = mapper and mapper.get_rename_mapper()  # as vLLM's own loading has it
        self._parts: dict[tuple[str, Shape, Shape], tuple[list[_Part], list[_Part]]] = {}

    def differing(self, number: int, folder: Path, samples: Iterable[WeightSample]) -> Counter[str]:
        """How many samples of each tensor differ in the adapter `number`, of that folder.

        Besides the trainer's `samples`, some rows of each tensor in the folder are compared.
        """
        slot = self._manager.lora_index_to_id.index(number)
        helper = PEFTHelper.from_local_dir(str(folder), None)
        with safe_open(folder / ADAPTER_FILE, framework="pt") as file:
            names = [*file.keys()]  # a file is no mapping
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            own = [self._some(name, file.get_tensor(name), helper, number) for name in shapes]
        found: Counter[str] = Counter()
        for sample in (*samples, *own):
            parts = self._parts_of(sample.name, shapes)
            if not parts:  # not sent, or of no layer that vLLM gives adapters to
                found[sample.name] += sample.values.size
            for part in parts:
                found[sample.name] += _num_differing(
                    part, slot, sample, self._scaling(sample.name, helper)
                )
        return +found

    def _some(self, name: str, tensor: Tensor, helper: PEFTHelper, seed: int) -> WeightSample:
        rows = np.random.default_rng(seed).permutation(len(tensor))[:NUM_READ]
        values = tensor[rows].float() * (self._scaling(name, helper) or 1.0)
        return WeightSample(name, rows, np.arange(tensor.shape[1]), values.numpy())

    def _scaling(self, name: str, helper: PEFTHelper) -> float | None:
        """That of a B by the adapter's own configuration; None for an A."""
        module, is_a = parse_fine_tuned_lora_name(name)
        return None if is_a else float(helper.get_rank_and_scaling(module)[1])

    def _parts_of(self, name: str, shapes: dict[str, Shape]) -> list[_Part]:
        other = name.replace(".lora_A.", ".lora_B.")
        pair = (other.replace(".lora_B.", ".lora_A."), other)
        if name not in pair or not shapes.keys() >= {*pair}:
            return []
        module, is_a = parse_fine_tuned_lora_name(name, self._mapper)
        key = (module, shapes[pair[0]], shapes[pair[1]])
        if key not in self._parts:
            self._parts[key] = self._find(*key)
        return self._parts[key][0 if is_a else 1]

    def _find(self, name: str, *shapes: Shape) -> tuple[list[_Part], list[_Part]]:
        """The parts of an A and its B: vLLM itself puts numbered ones where theirs belong."""
        layer, index, number = self._layer(name)
        if layer is None:
            return [], []
        scratch = copy.copy(layer)
        for attribute in ("lora_a_stacked", "lora_b_stacked"):
            held = getattr(layer, attribute)
            empty = (torch.zeros(1, *each.shape[1:], dtype=torch.float64) for each in held)
            setattr(scratch, attribute, tuple(empty))
        numbered: list[Any] = [
            torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).view(shape)
            for shape in shapes
        ]
        if number:
            numbered = [
                [None] * index + [each] + [None] * (number - index - 1) for each in numbered
            ]
        scratch.set_lora(0, *numbered)
        a, b = (
            [*_numbered_parts(getattr(scratch, attribute), getattr(layer, attribute), shape[1])]
            for attribute, shape in zip(("lora_a_stacked", "lora_b_stacked"), shapes, strict=True)
        )
        return a, b

    def _layer(self, name: str) -> tuple[Any, int, int]:
        """vLLM's layer, and the place among those that it is made of, and how many these are."""
        for merged, parts in self._manager.packed_modules.items():
            if name in parts:
                return self._manager.modules[merged], parts.index(name), len(parts)
        return self._manager.modules.get(name), 0, 0


def _numbered_parts(
    scratch: Iterable[Tensor], live: Iterable[Tensor], width: int
) -> Iterator[_Part]:
    for numbers, buffer in zip(scratch, live, strict=True):
        grid = numbers[0, 0].numpy().astype(np.int64) - 1
        rows, columns = (grid.max(axis, initial=-1) for axis in (1, 0))
        rows, columns = (
            np.where(rows < 0, -1, rows // width),
            np.where(columns < 0, -1, columns % width),
        )
        if (grid >= 0).any():
            yield _Part(buffer, torch.from_numpy(rows), torch.from_numpy(columns))


def _num_differing(part: _Part, slot: int, sample: WeightSample, scaling: float | None) -> int:
    at, of = common(part.rows, sample.rows)
    across, of_columns = common(part.columns, sample.columns)
    live = part.buffer[slot, 0][at.to(part.buffer.device)].cpu()[:, across]
    sent = torch.from_numpy(sample.values)[of][:, of_columns]
    if scaling is None:
        return int((live != sent.to(live.dtype)).sum())
    # vLLM rounds a B, and then its product with the scaling; a trainer may do so itself.
    bounds = [
        ((sent.double() / scaling * (1 + step)).to(live.dtype) * scaling).double()
        for step in (-FLOAT32_STEP, FLOAT32_STEP)
    ]
    low, high = torch.minimum(*bounds), torch.maximum(*bounds)
    is_within = (low <= live) & (live <= high)
    return int((~is_within & (live != sent.to(live.dtype))).sum())


def leave_base_rows_alone() -> None:
    """Give tokens without an adapter none: on a CPU vLLM would give them that of the last slot."""
    shrink = lora_ops.bgmv_shrink

    def shrink_others(
        inputs: Tensor, weights: Tensor, output: Tensor, indices: Tensor, scaling: float = 1.0
    ) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output[indices < 0] = 0  # their index is -1

    if shrink.__name__ != shrink_others.__name__:
        lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = shrink_others
