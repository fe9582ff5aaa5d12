"""The ways of attention that are compared answer the same question."""

import torch

from benchmarks.gpu.attention import dense_mask, packed, padded, random_row
from benchmarks.gpu.shapes import TOY

LENGTHS = [7, 3, 12, 1]
CPU = torch.device("cpu")


def test_packed_padded_and_dense_mask_attend_alike():
    torch.manual_seed(0)
    row = random_row(TOY, sum(LENGTHS), device=CPU, dtype=torch.float32)
    row = [tensor.detach() for tensor in row]
    parts = zip(*(tensor.split(LENGTHS, dim=2) for tensor in row), strict=True)
    filled = [[_fill(tensor, max(LENGTHS)) for tensor in part] for part in parts]
    wide = [torch.cat(tensors) for tensors in zip(*filled, strict=True)]
    by_packed = packed(LENGTHS, CPU)(row)[0]
    by_mask = dense_mask(LENGTHS, CPU)(row)[0]
    rows = padded(LENGTHS, CPU)(wide)
    by_padded = torch.cat([rows[i, :length] for i, length in enumerate(LENGTHS)])
    torch.testing.assert_close(by_mask, by_packed, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(by_padded, by_packed, rtol=1e-5, atol=1e-6)


def _fill(tensor, length):
    """Noise behind the sequence, [1, heads, length, D]: no token may see it."""
    missing = length - tensor.shape[2]
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing), value=9.0)
