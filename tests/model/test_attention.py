"""Packed attention against the formula, one sequence at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.model.attention import choose_attention, packed_attention

HEADS, KV_HEADS, SIZE = 4, 2, 8


def formula(query, key, value, *, window=None):
    """softmax(q k / sqrt(d)) v with a causal mask, for [heads, L, D]."""
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (key, value))
    scores = query @ key.transpose(1, 2) * SIZE**-0.5
    distance = torch.arange(query.shape[1])[:, None] - torch.arange(query.shape[1])[None]
    visible = (distance >= 0) & (distance < (window or query.shape[1]))
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value


def random_row(num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, heads, num_tokens, SIZE, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def attend(tensors, lengths, **kwargs):
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    output, _ = packed_attention(
        torch.nn.Identity(),
        *tensors,
        None,
        scaling=SIZE**-0.5,
        cu_seq_lens_q=cu_seqlens,
        max_length_q=max(lengths),
        **kwargs,
    )
    return output[0].transpose(0, 1)  # [A, T, D]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_every_sequence_attends_as_if_alone(lengths, window, seed):
    row = [tensor.requires_grad_() for tensor in random_row(sum(lengths), seed)]
    got = attend(row, lengths, sliding_window=window)
    parts = zip(*(tensor[0].split(lengths, dim=1) for tensor in row), strict=True)
    expected = torch.cat([formula(*part, window=window) for part in parts], dim=1)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(x.sin().sum(), row, retain_graph=True) for x in (got, expected)]
    for got_grad, expected_grad in zip(*grads, strict=True):
        torch.testing.assert_close(got_grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_a_row_without_boundaries_is_one_sequence():
    row = random_row(6, seed=1)
    output, _ = packed_attention(torch.nn.Identity(), *row, None, scaling=SIZE**-0.5)
    torch.testing.assert_close(output[0].transpose(0, 1), formula(*(x[0] for x in row)))


@pytest.mark.parametrize("kwargs", [{"dropout": 0.1}, {"softcap": 30.0}])
def test_what_it_cannot_reproduce_is_refused(kwargs):
    with pytest.raises(ValueError, match="without mask, dropout or softcap"):
        attend(random_row(3, seed=0), [3], **kwargs)


def test_a_cpu_packs_with_our_own_attention():
    assert choose_attention(torch.device("cpu")) == "packed"
    assert choose_attention(torch.device("cuda"), dtype=torch.float32) == "packed"
