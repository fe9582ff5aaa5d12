"""Attention over packed rows: sequences end to end, none of which attends to another.

Registered with transformers as "packed". Legend: T packed tokens, S sequences, A query heads,
K key-value heads, D head size; values of latent attention have another, E.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.attention
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

from async_grpo.util.errors import UnfitModel

logger = logging.getLogger(__name__)
PACKED = "packed"  # the name under which transformers knows `packed_attention`
FLASH_2 = "flash_attention_2"  # transformers' own name
# Torch's names of other kernels, which it has for devices of these major compute capabilities.
FLASH: dict[str, tuple[tuple[int, ...], Callable[[], object]]] = {
    "FA3": ((9,), lambda: find_spec("flash_attn_interface")),
    "FA4": ((9, 10), lambda: has_distribution("flash-attn-4")),  # flash-attn has its modules, too
}
# Arguments of transformers that are used before attention, or repeat what others say.
WITHOUT_EFFECT = {
    "position_ids", "use_cache", "cu_seq_lens_k", "max_length_k", "output_router_logits", "seq_idx",
}  # fmt: skip
Borders = tuple[Tensor, Tensor]  # [S+1] int32 each: of the new tokens of sequences, and of all
Heads = tuple[Tensor, Tensor, Tensor]  # query [1, A, T, D], key and value [1, K, T, D]
HALF_TYPES = (torch.bfloat16, torch.float16)
# `varlen_attn` accepts grouped heads; since torch 2.12 it needs a flag for them.
GROUPED_HEADS = {"enable_gqa": True} if torch.__version__ >= (2, 12) else {}


def choose_attention(
    device: torch.device, *, dtype: torch.dtype = torch.bfloat16, wanted: str = "auto"
) -> str:
    """Transformers' name of the attention for packed rows on `device`, computing in `dtype`.

    `wanted`: `packed` is our own, by torch's kernel; `auto` is the same by FlashAttention-3 or 4
    where one is installed; `flash_attention_2` is transformers'. Raises UnfitModel where it cannot
    run.
    """
    is_half_on_cuda = device.type == "cuda" and dtype in HALF_TYPES
    if wanted == FLASH_2:
        if not is_half_on_cuda or not is_flash_attn_2_available():
            raise UnfitModel(
                f"attention {FLASH_2} needs a CUDA device, bf16 or fp16 and the package "
                f"flash-attn, got {device.type}, {dtype} and flash-attn "
                f"{'installed' if is_flash_attn_2_available() else 'not installed'}: use "
                "--attention auto"
            )
        return FLASH_2
    if wanted == "auto" and is_half_on_cuda and (name := activate_flash(device)):
        logger.info("attention uses FlashAttention-%s", name[-1])
    return PACKED


@functools.cache
def activate_flash(device: torch.device) -> str:
    """Switch torch's kernels, also `varlen_attn`, to FlashAttention-3 or 4, if possible.

    Both are separate packages, each for some generations of devices. Returns torch's name of the
    one that is used, or "".
    """
    major = torch.cuda.get_device_capability(device)[0]
    for name, (majors, is_installed) in FLASH.items():
        if major not in majors or not is_installed():
            continue
        try:
            from torch.nn.attention import activate_flash_attention_impl

            activate_flash_attention_impl(name)
            return name
        # Of torch before 2.11, or one that does not know it; made for another torch.
        except (ImportError, RuntimeError, ValueError) as error:
            logger.warning("%s is installed but cannot be used: %s", name, error)
    return ""


def has_distribution(name: str) -> bool:
    """Whether a package of this name is installed, whichever modules it has."""
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def flash_in_use() -> str:
    """Torch's name of the kernels that it was switched to, or "" for its own."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # not in torch 2.11
    return (current and current()) or ""


def drop_flash() -> None:
    """Switch back to torch's own kernels, if others are in use."""
    from torch.nn.attention import restore_flash_attention_impl

    if flash_in_use():
        restore_flash_attention_impl()


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
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    repeat_index: Tensor | None = None,
    first_index: Tensor | None = None,
    is_trie: bool = False,
    gathers_again: bool = False,
    **others: object,
) -> tuple[Tensor, None]:
    """Causal attention within every sequence of a row; the signature is transformers'.

    query [1, A, T, D], key [1, K, T, D], value [1, K, T, E], cu_seq_lens_q [S+1] (absent: one).
    Where sequences share tokens, `repeat_index` [U] and `first_index` [T] map to the row of whole
    sequences and back (see PackedMinibatch), which are gathered; in a trie, only what no earlier
    sequence has asks. With `gathers_again` the backward pass gathers, and attends, again. With
    `softcap`, scores are softcap * tanh(score / softcap); with `s_aux` [A], the sinks, a share of
    each head's attention goes to nothing; with either, all scores of one sequence are in memory.
    Returns [1, T, A, E]. Raises ValueError for arguments that it does not support.
    """
    named = others.keys() - WITHOUT_EFFECT
    unknown = {n for n in named if not (others[n] is None or others[n] is False)}
    if attention_mask is not None or dropout or unknown or query.shape[0] != 1:
        raise ValueError(
            "packed attention takes one row without mask or dropout, and no other options, got "
            f"rows={query.shape[0]} mask={attention_mask is not None} {dropout=} "
            f"options={sorted(unknown)}: use a model without these"
        )
    if cu_seq_lens_q is None or max_length_q is None:
        max_length_q = query.shape[2]
        cu_seq_lens_q = torch.tensor([0, max_length_q], dtype=torch.int32, device=query.device)
    new = whole = cu_seq_lens_q
    if first_index is not None:
        new = torch.searchsorted(first_index, whole.long(), out_int32=True)
    scores = Scores(softcap, s_aux) if softcap or s_aux is not None else None
    # The fused kernel has neither softcap nor sinks.
    is_fused = query.device.type == "cuda" and query.dtype in HALF_TYPES and scores is None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if repeat_index is not None:
            key, value = (_tokens(tensor, repeat_index) for tensor in (key, value))
            query = query if is_trie and is_fused else _tokens(query, repeat_index)
        heads, borders = (query, key, value), (new if is_trie or not is_fused else whole, whole)
        if not is_fused:
            return _by_sequence(heads, borders, scaling, sliding_window, scores, is_trie)
        output = _varlen(heads, borders, max_length_q, scaling, sliding_window)
        return output if first_index is None or is_trie else output.index_select(1, first_index)

    run = functools.partial(checkpoint, attend, use_reentrant=False) if gathers_again else attend
    return run(query, key, value), None


class Scores(NamedTuple):
    """What changes the scores of attention between product and softmax."""

    softcap: float | None
    sinks: Tensor | None  # [A], a score of each head for no key at all


def _tokens(tensor: Tensor, index: Tensor) -> Tensor:
    """The tokens [1, A, U, D] of [1, A, T, D]; selecting whole tokens is several times faster."""
    _, heads, _, size = tensor.shape
    rows = tensor[0].transpose(0, 1).flatten(1).index_select(0, index)
    return rows.view(len(index), heads, size).transpose(0, 1)[None]


def _varlen(
    heads: Heads, cu_seqlens: Borders, max_seqlen: int, scaling: float | None, window: int | None
) -> Tensor:
    """One fused CUDA kernel over all sequences, [1, T, A, E]."""
    from torch.nn.attention.varlen import varlen_attn  # imports CUDA kernels

    query, key, value = heads
    missing = query.shape[-1] - value.shape[-1]  # the kernel has one size of heads
    if missing:
        heads = query, key, pad(value, (0, missing))
    rows = (tensor[0].transpose(0, 1) for tensor in heads)
    look_back = -1 if window is None else window - 1
    output = varlen_attn(
        *rows,
        *cu_seqlens,
        max_seqlen,
        max_seqlen,
        scale=scaling,
        window_size=(look_back, 0),
        **GROUPED_HEADS,
    )
    return output[None, ..., : value.shape[-1]]


@torch.compiler.disable  # lengths differ in every row: compiling would never end
def _by_sequence(
    heads: Heads,
    cu_seqlens: Borders,
    scaling: float | None,
    window: int | None,
    scores: Scores | None,
    is_trie: bool,
) -> Tensor:
    """One attention call a sequence, exact on every device and type, [1, T, A, E].

    New tokens ask alone where they are less than half of a trie's sequence: a mask costs what
    causality halves.
    """
    new, whole = (borders.diff().tolist() for borders in cu_seqlens)
    outputs = []
    # Projections lay tensors out token by token: cut and joined by tokens, nothing is reordered.
    rows = (tensor.transpose(1, 2).split(whole, dim=1) for tensor in heads)
    for count, *parts in zip(new, *rows, strict=True):
        q, k, v = (part.transpose(1, 2) for part in parts)
        if not count:  # all of it is part of an earlier sequence
            continue
        if is_trie and 2 * count < q.shape[2]:
            q = q[:, :, -count:]
        if scores:
            outputs.append(_whole(q, k, v, scaling, window, scores)[:, -count:])
            continue
        # None: causality alone decides.
        is_whole = q.shape[2] == k.shape[2] and not (window and k.shape[2] > window)
        mask = None if is_whole else _causal_mask(q.shape[2], k.shape[2], window, q.device)
        output = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output.transpose(1, 2)[:, -count:])
    return torch.cat(outputs, dim=1)


def _whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    change: Scores,
) -> Tensor:
    """Attention of one sequence's last Q tokens, [1, Q, A, E], with all scores [1, A, Q, L]."""
    groups, length = query.shape[1] // key.shape[1], key.shape[2]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if change.softcap:
        scores = query @ key.transpose(2, 3) * (scale / change.softcap)
        scores = change.softcap * scores.tanh()
    else:
        scores = query @ key.transpose(2, 3) * scale
    scores = scores.masked_fill(
        ~_causal_mask(query.shape[2], length, window, query.device), -torch.inf
    )
    if change.sinks is not None:
        sinks = change.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(1, -1, query.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    at_least_float32 = torch.promote_types(query.dtype, torch.float32)
    shares = scores.softmax(-1, dtype=at_least_float32)[..., :length]
    return (shares.to(query.dtype) @ value).transpose(1, 2)


def _causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] bool: which keys each of the last tokens attends to, `window` at most."""
    everything, first = torch.ones(queries, keys, dtype=torch.bool, device=device), keys - queries
    return everything.tril(first).triu(first + 1 - (window or keys))


AttentionInterface.register(PACKED, packed_attention)
