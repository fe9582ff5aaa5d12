"""The name of a shared CUDA buffer, made of plain values.

torch describes a shared tensor with classes among the values, which vLLM would only carry with
pickle, switched on for every message to its engine. The buffer is always a flat run of bytes, so
its classes are known.
"""

from __future__ import annotations

from typing import Any

import torch

# Positions among the arguments of torch's `rebuild_cuda_tensor`.
SIZE, STRIDE = 1, 2
CLASSES = {0: torch.Tensor, 4: torch.storage.TypedStorage, 5: torch.uint8}


def plain_handle(arguments: tuple[Any, ...]) -> list[Any]:
    """What `reduce_tensor` says of a flat uint8 CUDA tensor, without its classes."""
    plain = list(arguments)
    for position, known in CLASSES.items():
        if plain[position] is not known:
            raise TypeError(f"a shared buffer must be of {known}, got {plain[position]}")
        plain[position] = None
    plain[SIZE], plain[STRIDE] = list(plain[SIZE]), list(plain[STRIDE])
    return plain


def full_handle(plain: list[Any]) -> tuple[Any, ...]:
    """The inverse of `plain_handle`."""
    arguments = list(plain)
    for position, known in CLASSES.items():
        arguments[position] = known
    arguments[SIZE], arguments[STRIDE] = torch.Size(plain[SIZE]), tuple(plain[STRIDE])
    return tuple(arguments)
