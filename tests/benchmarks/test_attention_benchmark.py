"""The attention benchmark compares ways that answer the same question.

Seen to fail, in a copy of `benchmarks/gpu/attention.py`: the mask not causal; the mask not
by sequence; padding that is not causal.
"""

import torch

from benchmarks import attention
from benchmarks.gpu.attention import dense_mask, packed, padded

LENGTHS = [7, 3, 12, 1]


def test_packed_padded_and_dense_mask_attend_alike():
    row = [tensor.detach() for tensor in attention.make_row(1, sum(LENGTHS))]
    parts = zip(*(tensor.split(LENGTHS, dim=2) for tensor in row), strict=True)
    filled = [[_fill(tensor, max(LENGTHS)) for tensor in part] for part in parts]
    wide = [torch.cat(tensors) for tensors in zip(*filled, strict=True)]
    by_packed = packed(LENGTHS, attention.CPU)(row)[0]
    by_mask = dense_mask(LENGTHS, attention.CPU)(row)[0]
    rows = padded(LENGTHS, attention.CPU)(wide)
    by_padded = torch.cat([rows[i, :length] for i, length in enumerate(LENGTHS)])
    torch.testing.assert_close(by_mask, by_packed, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(by_padded, by_packed, rtol=1e-5, atol=1e-6)


def _fill(tensor, length):
    """Noise behind the sequence, [1, heads, length, D]: no token may see it."""
    missing = length - tensor.shape[2]
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing), value=9.0)
