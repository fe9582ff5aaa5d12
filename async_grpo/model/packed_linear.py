"""Frozen weights in 4 or 8 bits under an adapter (QLoRA, arXiv 2305.14314), by bitsandbytes.

Of each block of 64 numbers of a weight, flat, there are the largest absolute value in float32, and
of each number the nearest of 16 levels of it (NF4, section 3 of the paper), or of 255 even ones.
Rounding does not change a rounded weight, for a block's largest number stays what it is: an engine
that serves it computes with the very numbers of the trainer. For that, scales are not quantised in
their turn.

Every rank has all packed weights: nothing of them is gathered, and FSDP2 knows them as buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from async_grpo.devices.bill import PACKED_BITS, PACKED_BLOCK
from async_grpo.util.errors import ConfigError, UnfitModel


@functools.cache
def library() -> Any:
    """bitsandbytes; raises `ConfigError` where it is not installed."""
    try:
        import bitsandbytes  # seconds
    except ImportError as error:
        raise ConfigError(
            "--base-quantization, `quantize` and every --optim but adamw need bitsandbytes, which "
            f"cannot be imported ({error}): pip install bitsandbytes"
        ) from error
    return bitsandbytes


def packed(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(levels as uint8, flat, two a byte of NF4, scales in float32 [ceil(n / 64)])."""
    flat = weight.detach().reshape(-1)  # the library's kernel for CPUs cuts rows into blocks
    if kind == "nf4":
        codes, state = library().functional.quantize_4bit(
            flat, blocksize=PACKED_BLOCK, compress_statistics=False, quant_type=kind
        )
        return codes.reshape(-1), state.absmax
    codes, state = library().functional.quantize_blockwise(
        flat, code=_even(flat.device), blocksize=PACKED_BLOCK
    )
    return codes, state.absmax


def unpacked(codes: Tensor, scales: Tensor, kind: str, *, like: Tensor) -> Tensor:
    """The weight in the form and the type, float32, bf16 or fp16, of `like`."""
    functions = library().functional
    state = functions.QuantState(
        absmax=scales, shape=(like.numel(),), blocksize=PACKED_BLOCK, dtype=like.dtype,
        quant_type=kind, code=None if kind == "nf4" else _even(codes.device),
    )  # fmt: skip
    if kind == "nf4":
        flat: Tensor = functions.dequantize_4bit(codes[:, None], state)
    else:
        flat = functions.dequantize_blockwise(codes, state)
    return flat.reshape(like.shape)


def rounded(weight: Tensor, kind: str) -> Tensor:
    """The weight of what `kind` can say, in its type, which `packed` keeps to the bit."""
    return unpacked(*packed(weight, kind), kind, like=weight)


@functools.cache
def _even(device: torch.device) -> Tensor:
    """Even levels from -1 to 1; with both ends, a block's largest number stays what it is."""
    return torch.cat([torch.arange(-127, 128) / 127, torch.ones(1)]).to(device)


class PackedLinear(nn.Module):
    """A linear layer with a frozen packed weight, whole on every rank; meta until it is filled."""

    codes: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__()
        self.kind, self.bias = kind, linear.bias
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self._stored = torch.float32  # the folder's type
        numbers = self.out_features * self.in_features
        self.outline = torch.empty_like(linear.weight, device="meta")  # of the weight, its type too
        for name, number, dtype in (
            ("codes", ceil(numbers * PACKED_BITS[kind] / 8), torch.uint8),
            ("scales", ceil(numbers / PACKED_BLOCK), torch.float32),
        ):
            empty = torch.empty(number, dtype=dtype, device="meta")
            self.register_buffer(name, empty, persistent=False)

    def fill(self, weight: Tensor, name: str) -> None:
        """Pack `weight` [out, in]; raises `UnfitModel` for one that this would change."""
        codes, scales = packed(weight, self.kind)
        if not torch.equal(unpacked(codes, scales, self.kind, like=weight), weight):
            raise UnfitModel(
                f"with --base-quantization {self.kind} a model must hold what that can say, for "
                f"engines to compute with the same weights, {name} does not: write such a folder "
                f"with `async-grpo quantize MODEL OUT --kind {self.kind}`, for all roles"
            )
        self._stored = weight.dtype
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    @property
    def weight(self) -> Tensor:
        """The weight [out, in] as the folder has it, made anew, in the frozen model's type."""
        like = self.outline.to(self._stored)
        return unpacked(self.codes, self.scales, self.kind, like=like).to(self.outline.dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs [..., in]; returns [..., out]."""
        found: Tensor = _Product.apply(inputs, self)
        return found


class _Product(torch.autograd.Function):
    """x W' + b; the backward pass unpacks W again, so that only x's gradient is ever computed."""

    @staticmethod
    def forward(ctx: FunctionCtx, inputs: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(inputs, layer.weight.to(inputs.dtype), layer.bias)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        [grad] = grads
        return grad @ ctx.layer.weight.to(grad.dtype), None


def packed_layers(module: nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    """(path, layer) of those with packed weights."""
    return ((n, each) for n, each in module.named_modules() if isinstance(each, PackedLinear))


def packed_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, outline) of packed weights, which are no parameters; an outline has no values."""
    return ((f"{path}.weight", layer.outline) for path, layer in packed_layers(module))
