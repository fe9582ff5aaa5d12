"""A teacher's distribution at each token, as the arrays that are sent to the trainer.

Legend: N tokens of a forward, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from async_grpo.algorithms.distillation_loss import top_k_with_tail
from async_grpo.model.collate import split_by_row
from async_grpo.model.lm_head import Head
from async_grpo.model.scorer import CHUNK_SIZE, Scorer, TokenIds
from async_grpo.types import Arrays, Payload


@torch.no_grad()
def teach(
    scorer: Scorer,
    pairs: Sequence[tuple[TokenIds, TokenIds]],
    *,
    temperature: float,
    payload: Payload,
    width: int,
) -> list[tuple[NDArray[np.float32], Arrays]]:
    """For each pair (prompt ids, output ids): [L] log-probabilities at `temperature`, the payload.

    `width`: how many columns of the vocabulary, from the first, a payload is over.
    """
    packed = scorer.packed(pairs)
    hidden, head = scorer.policy.hidden_states(packed), scorer.head
    labels = scorer.logprobs(hidden, packed, temperature=temperature, width=width)
    tensors = _tensors(hidden, head, payload, width)
    by_row = [split_by_row(tensor, packed) for tensor in tensors.values()]
    arrays = [
        dict(zip(tensors, map(to_array, parts), strict=True)) for parts in zip(*by_row, strict=True)
    ]
    return list(zip(labels, arrays, strict=True))


def _tensors(hidden: Tensor, head: Head, payload: Payload, width: int) -> dict[str, Tensor]:
    """[N, ...] each. Logits exist for a chunk of tokens at a time, but for the kind `logits`."""
    if payload.kind == "hidden":
        return {"hidden": hidden}
    chunks = (head.logits(part) for part in hidden.split(CHUNK_SIZE))
    if payload.kind == "logits":
        return {"logits": torch.cat([chunk[:, :width].to(hidden.dtype) for chunk in chunks])}
    k, temperature = payload.top_k, payload.temperature
    chosen = [top_k_with_tail(c, k, temperature=temperature, width=width) for c in chunks]
    ids, logprobs, tail = (torch.cat(parts) for parts in zip(*chosen, strict=True))
    return {"ids": ids, "logprobs": logprobs, "tail": tail}


def to_array(tensor: Tensor) -> NDArray[np.generic]:
    """The tensor as an array; bfloat16, which numpy does not have, as the bits in uint16."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()
