"""The head: from hidden states to logits, and its products in float32.

Logits are float32 (float64 for a float64 model), also those of bf16 hidden states and weights.

Legend: C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from async_grpo.model.rescaling import UNCHANGED, Rescaling


class Head(NamedTuple):
    """What makes logits of hidden states."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V], where -inf excludes a token
    rescaling: Rescaling = UNCHANGED

    def logits(self, hidden: Tensor) -> Tensor:
        """[C, V] of hidden states [C, H], in at least float32: a fresh tensor."""
        logits = product(hidden, self.weight.T)
        if self.bias is not None:
            logits += self.bias
        return self.rescaling.apply_(logits)

    def columns(self, part: slice) -> Head:
        """The head of these tokens of the vocabulary alone."""
        bias = None if self.bias is None else self.bias[part]
        return self._replace(weight=self.weight[part], bias=bias)


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`, whose sums are float32 inside, without rounding them to bf16."""
    if left.dtype in (torch.float32, torch.float64):
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right`, without a second tensor of `total`'s size where torch can."""
    if left.dtype == total.dtype or left.device.type == "cpu":
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
    elif _adds_into_float32(left.device, left.dtype):
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total += product(left, right)


@functools.cache
def _adds_into_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether half precision's products can be added to a float32 tensor in place.

    Asked with a small one: torch has the overload for CUDA alone, and older ones want all three
    tensors of one type.
    """
    total = torch.ones(8, 8, device=device)
    ones = torch.ones(8, 8, device=device, dtype=dtype)
    try:
        torch.ops.aten.addmm.dtype_out(total, ones, ones, total.dtype, out=total)
    except (AttributeError, RuntimeError):  # no overload; none for this device or these types
        return False
    return bool((total == 9.0).all())
