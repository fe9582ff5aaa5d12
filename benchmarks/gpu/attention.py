"""One layer of causal attention over packed rows, forward and backward, by the ways there are.

`packed` is what the trainer calls. Rows of the same number of tokens, cut into other lengths;
`padded` computes every sequence at the longest one's length, as unpacked training does. Arithmetic
that padding or a mask adds is not counted in the TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from async_grpo.model.attention import packed_attention
from benchmarks.gpu import clock, rows
from benchmarks.gpu.isolation import NotHereError
from benchmarks.gpu.shapes import Shape, attention_flops
from benchmarks.results import Figure, median

Row = list[Tensor]  # query [1, A, T, D], key and value [1, K, T, D]
Attend = Callable[[Row], Tensor]
MakeAttend = Callable[[Sequence[int], torch.device], Attend]


def boundaries(segments: Sequence[int], device: torch.device) -> Tensor:
    """[S+1] int32."""
    return torch.tensor([0, *segments], device=device).cumsum(0).int()


def packed(segments: Sequence[int], device: torch.device) -> Attend:
    where, longest = boundaries(segments, device), max(segments)
    layer = torch.nn.Identity()

    def attend(row: Row) -> Tensor:
        return packed_attention(layer, *row, None, cu_seq_lens_q=where, max_length_q=longest)[0]

    return attend


def by_sequence(segments: Sequence[int], device: torch.device) -> Attend:
    """One SDPA a sequence: as many launches as there are sequences."""

    def attend(row: Row) -> Tensor:
        parts = zip(*(tensor.split(list(segments), dim=2) for tensor in row), strict=True)
        outputs = [_causal(part) for part in parts]
        return torch.cat(outputs, dim=2).transpose(1, 2)

    return attend


def flash_attn_2(segments: Sequence[int], device: torch.device) -> Attend:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError as error:
        raise NotHereError(f"flash-attn cannot be imported: {error}") from error
    where, longest = boundaries(segments, device), max(segments)

    def attend(row: Row) -> Tensor:
        flat = (tensor[0].transpose(0, 1) for tensor in row)
        return flash_attn_varlen_func(*flat, where, where, longest, longest, causal=True)[None]

    return attend


def dense_mask(segments: Sequence[int], device: torch.device) -> Attend:
    """What transformers does with a packed row and no varlen kernel."""
    counts = torch.tensor(segments, device=device)
    owner = torch.arange(len(segments), device=device).repeat_interleave(counts)
    mask = (owner[:, None] == owner[None]).tril_()[None, None]

    def attend(row: Row) -> Tensor:
        layer = _Grouped(row[0].shape[1] // row[1].shape[1])
        return sdpa_attention_forward(layer, *row, mask)[0]

    return attend


def padded(segments: Sequence[int], device: torch.device) -> Attend:
    """A row for each sequence, [S, A, longest, D]: see `pad`."""
    return lambda row: _causal(row).transpose(1, 2)


WAYS: dict[str, MakeAttend] = {
    "packed": packed,
    "by sequence": by_sequence,
    "flash-attn 2": flash_attn_2,
    "padded": padded,
    "dense mask": dense_mask,
}


class _Grouped(torch.nn.Module):
    """What transformers asks an attention layer for."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def _causal(row: Sequence[Tensor]) -> Tensor:
    return scaled_dot_product_attention(*row, is_causal=True, enable_gqa=True)


def random_row(
    shape: Shape, num_tokens: int, *, device: torch.device, dtype: torch.dtype, num_rows: int = 1
) -> Row:
    """Query, key and value as transformers hands them over: views of [rows, T, heads, D]."""
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    sizes = [(num_rows, num_tokens, count, shape.head_size) for count in heads]
    tensors = [torch.randn(size, device=device, dtype=dtype) for size in sizes]
    return [tensor.transpose(1, 2).requires_grad_() for tensor in tensors]


def run(attend: Attend, row: Row) -> None:
    """Forward and backward, with the output as its own gradient."""
    output = attend(row)
    output.backward(output.detach())
    for tensor in row:
        tensor.grad = None


def measure(way: str, *, shape: Shape, num_tokens: int, repeats: int = 7) -> Iterator[Figure]:
    """Time, speed and peak memory of one way, by how the row is cut."""
    device = clock.find_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for cut, segments in rows.mixtures(num_tokens).items():
        torch.manual_seed(0)
        num_rows, length = (len(segments), max(segments)) if way == "padded" else (1, num_tokens)
        row = random_row(shape, length, device=device, dtype=dtype, num_rows=num_rows)
        attend = WAYS[way](segments, device)

        def work(attend: Attend = attend, row: Row = row) -> None:
            run(attend, row)

        times = clock.repeated(work, device=device, warmups=2, repeats=repeats)
        name = f"attention, {way}, {cut}"
        yield median(f"{name}, time", times, "s")
        arithmetic = 3.0 * attention_flops(shape, segments) / 1e12
        rates = [arithmetic / value for value in times]
        yield median(f"{name}, arithmetic", rates, "TFLOP/s", better="higher")
        peak = clock.peak_bytes(work, device=device)
        yield Figure(f"{name}, extra memory", peak / clock.GIB, "GiB")
