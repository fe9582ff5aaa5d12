"""Attention over packed rows: sequences laid end to end, none of which sees another.

Registered with transformers as "packed". Legend: T packed tokens, S sequences, A query heads,
K key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

PACKED = "packed"  # the name under which transformers knows `packed_attention`
Heads = tuple[Tensor, Tensor, Tensor]  # query [1, A, T, D], key and value [1, K, T, D]
HALF_TYPES = (torch.bfloat16, torch.float16)
# The kernel has always taken grouped heads; from torch 2.12 on, `varlen_attn` needs a flag for it.
GROUPED_HEADS = {"enable_gqa": True} if torch.__version__ >= (2, 12) else {}


def choose_attention(device: torch.device, *, dtype: torch.dtype = torch.bfloat16) -> str:
    """The best attention for packed rows that `device` has, computing in `dtype`.

    `flash_attention_3` or `flash_attention_2` where installed (CUDA and half precision only), else
    our own `packed`.
    """
    if device.type == "cuda" and dtype in HALF_TYPES:
        if is_flash_attn_3_available():
            return "flash_attention_3"
        if is_flash_attn_2_available():
            return "flash_attention_2"
    return PACKED


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    repeat_index: Tensor | None = None,
    first_index: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention within every sequence of a row; the signature is transformers'.

    query [1, A, T, D], key and value [1, K, T, D], cu_seq_lens_q [S+1] (absent: one sequence).
    Where sequences share a prompt that lies in the row once, `repeat_index` [U] and `first_index`
    [T] lead to the row of whole sequences and back (see PackedMinibatch).
    Returns [1, T, A, D]. Raises ValueError for what it cannot reproduce.
    """
    if attention_mask is not None or dropout or softcap or query.shape[0] != 1:
        raise ValueError(
            "packed attention takes one row without mask, dropout or softcap, got "
            f"rows={query.shape[0]} mask={attention_mask is not None} {dropout=} {softcap=}: "
            "use a model without these"
        )
    if cu_seq_lens_q is None or max_length_q is None:
        max_length_q = query.shape[2]
        cu_seq_lens_q = torch.tensor([0, max_length_q], dtype=torch.int32, device=query.device)
    if repeat_index is not None:
        query, key, value = (_tokens(tensor, repeat_index) for tensor in (query, key, value))
    heads = (query, key, value)
    if query.device.type == "cuda" and query.dtype in HALF_TYPES:
        output = _varlen(heads, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    else:
        output = _by_sequence(heads, cu_seq_lens_q, scaling, sliding_window)
    return output if first_index is None else output.index_select(1, first_index), None


def _tokens(tensor: Tensor, index: Tensor) -> Tensor:
    """[1, A, U, D] of [1, A, T, D]; selecting whole tokens' rows is several times faster."""
    _, heads, _, size = tensor.shape
    rows = tensor[0].transpose(0, 1).flatten(1).index_select(0, index)
    return rows.view(len(index), heads, size).transpose(0, 1)[None]


def _varlen(
    heads: Heads, cu_seqlens: Tensor, max_seqlen: int, scaling: float | None, window: int | None
) -> Tensor:
    """One fused CUDA kernel over all sequences, [1, T, A, D]."""
    from torch.nn.attention.varlen import varlen_attn  # imports CUDA kernels

    rows = (tensor[0].transpose(0, 1) for tensor in heads)
    look_back = -1 if window is None else window - 1
    output = varlen_attn(
        *rows,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=scaling,
        window_size=(look_back, 0),
        **GROUPED_HEADS,
    )
    return output[None]


@torch.compiler.disable  # lengths differ in every row: compiling would never end
def _by_sequence(
    heads: Heads, cu_seqlens: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """One SDPA a sequence, exact on every device and type, [1, T, A, D]."""
    lengths = cu_seqlens.diff().tolist()
    outputs = []
    # Token after token is how projections lay tensors out: cut and joined so, nothing is reordered.
    rows = (tensor.transpose(1, 2).split(lengths, dim=1) for tensor in heads)
    for parts in zip(*rows, strict=True):
        q, k, v = (part.transpose(1, 2) for part in parts)
        mask = _window_mask(q.shape[2], window, q.device)
        output = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=1)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """[length, length] bool of a causal sliding window; None where causality alone decides."""
    if window is None or length <= window:
        return None
    everything = torch.ones(length, length, dtype=torch.bool, device=device)
    return everything.tril() & everything.triu(1 - window)


AttentionInterface.register(PACKED, packed_attention)
