"""The head: from hidden states to logits, and its products in float32.

Logits are float32 (float64 for a float64 model), also those of bf16 hidden states and weights. Some
models rescale them. How is known by model type: one option may be a factor in one family and a
divisor in another.

Legend: C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from async_grpo.util.errors import UnfitModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Rescaling(NamedTuple):
    """logits = softcap * tanh(factor * head(hidden) / softcap); without a softcap only the factor.

    A named tuple, because compiled functions take it as an argument.
    """

    factor: float = 1.0
    softcap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        """Rescale the head's output in place."""
        if self.factor != 1.0:
            logits.mul_(self.factor)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of the rescaled `logits` by the head's output; a new tensor."""
        if self.softcap is None:
            return self.factor
        # d tanh = 1 - tanh^2
        return logits.div(self.softcap).square_().neg_().add_(1.0).mul_(self.factor)


UNCHANGED = Rescaling()


class Head(NamedTuple):
    """The output layer, from hidden states to logits."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V], where -inf excludes a token
    rescaling: Rescaling = UNCHANGED

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [C, V] of hidden states [C, H], in at least float32; a new tensor."""
        logits = product(hidden, self.weight.T)
        if self.bias is not None:
            logits += self.bias
        return self.rescaling.apply_(logits)

    def columns(self, part: slice) -> Head:
        """The head restricted to these tokens of the vocabulary."""
        bias = None if self.bias is None else self.bias[part]
        return self._replace(weight=self.weight[part], bias=bias)


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` in float32 or float64, not rounded to bf16."""
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

    Tried with small tensors: torch has the overload for CUDA alone, and older versions require one
    type for all three.
    """
    total = torch.ones(8, 8, device=device)
    ones = torch.ones(8, 8, device=device, dtype=dtype)
    try:
        torch.ops.aten.addmm.dtype_out(total, ones, ones, total.dtype, out=total)
    except (AttributeError, RuntimeError):  # no overload; none for this device or these types
        return False
    return bool((total == 9.0).all())


# By model type, the options that rescale logits: a factor of one family is a divisor in another.
FACTORS = {
    "cohere": "logit_scale", "cohere2": "logit_scale", "cohere2_moe": "logit_scale",
    "falcon_h1": "lm_head_multiplier", "hyperclovax": "logits_scaling",
}  # fmt: skip
DIVISORS = dict.fromkeys(
    ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid",
     "granitemoeshared", "minicpm3"),
    "logits_scaling",
)  # fmt: skip
CAPPED = ("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "nanochat", "vaultgemma")
SOFTCAP = "final_logit_softcapping"
NEUTRAL = {  # options of a config that rescale logits, and the values that change nothing
    SOFTCAP: (None, 0, 0.0),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "lm_head_multiplier": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
}


def rescaling_of(config: PreTrainedConfig) -> Rescaling:
    """How a model rescales its head's output; UnfitModel for options that are unknown here."""
    kind = config.model_type
    if kind in FACTORS:
        return Rescaling(factor=getattr(config, FACTORS[kind]))
    if kind in DIVISORS:
        return Rescaling(factor=1 / getattr(config, DIVISORS[kind]))
    if kind in CAPPED:
        return Rescaling(softcap=config.final_logit_softcapping or None)
    for name, neutral in NEUTRAL.items():
        if (value := getattr(config, name, None)) not in neutral:
            raise UnfitModel(
                "a model's logits must be its head's output, or rescaled as those of "
                f"{', '.join(sorted({*FACTORS, *DIVISORS, *CAPPED}))}, but {config.name_or_path} "
                f"({kind}) sets {name}={value}: use a model without it"
            )
    return UNCHANGED
