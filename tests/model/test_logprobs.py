"""Chunked log-probabilities against the plain log_softmax."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from async_grpo.model.logprobs import token_logprobs


def plain(hidden, weight, targets, *, temperature, bias=None):
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs[torch.arange(len(targets)), targets], entropy


def inputs(num_tokens, *, vocab=11, hidden=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    return random(num_tokens, hidden), random(vocab, hidden), random(vocab), targets


@settings(max_examples=50, deadline=None)
@given(
    num_tokens=st.integers(0, 9),
    chunk_size=st.integers(1, 12),
    temperature=st.floats(0.3, 2.0),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_equal_log_softmax_for_any_chunk(
    num_tokens, chunk_size, temperature, with_bias, seed
):
    hidden, weight, bias, targets = inputs(num_tokens, seed=seed)
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    head_bias = bias if with_bias else None
    expected = plain(hidden, weight, targets, temperature=temperature, bias=head_bias)
    got = token_logprobs(
        hidden, weight, targets, temperature=temperature, chunk_size=chunk_size, bias=head_bias
    )
    factors = torch.linspace(-1, 2, num_tokens, dtype=torch.float64)
    sums = [(factors * value).sum() + value.square().sum() for value in (*expected, *got)]
    for got_value, expected_value in zip(got, expected, strict=True):
        torch.testing.assert_close(got_value, expected_value, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(a + b, leaves) for a, b in (sums[:2], sums[2:])]
    for got_grad, expected_grad in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(got_grad, expected_grad, rtol=1e-12, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    """Records the most elements of any tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def test_no_tensor_is_larger_than_one_chunk_of_logits_forward_or_backward():
    hidden, weight, _, targets = inputs(200, vocab=300, hidden=4)
    with LargestTensor() as largest:
        got = token_logprobs(hidden, weight, targets, temperature=0.9, chunk_size=8)
        (got.logprobs.sum() + got.entropy.sum()).backward()
    assert largest.num_elements == 8 * 300
    with LargestTensor() as largest:
        plain(hidden, weight, targets, temperature=0.9)
    assert largest.num_elements == 200 * 300


def test_low_precision_is_accumulated_in_float32():
    hidden, weight, _, targets = inputs(64, vocab=2000, hidden=16, dtype=torch.bfloat16)
    got = token_logprobs(hidden, weight, targets, temperature=1.0, chunk_size=10)
    exact = plain(hidden.double(), weight.double(), targets, temperature=1.0)
    assert got.logprobs.dtype == got.entropy.dtype == torch.float32
    rounding = 2**-8 * (hidden @ weight.T).abs().max().item()  # of the logits, not of their sums
    assert (got.logprobs - exact[0]).abs().max() < rounding
    got.logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    expected = torch.autograd.grad(exact[0].sum(), weight)[0].double()
    assert (weight.grad.double() - expected).norm() < 0.02 * expected.norm()


def test_entropy_of_equal_logits_is_log_v():
    hidden, weight = torch.zeros(3, 4), torch.ones(7, 4)
    got = token_logprobs(hidden, weight, torch.tensor([0, 3, 6]), temperature=1.0, chunk_size=2)
    torch.testing.assert_close(got.entropy, torch.full((3,), 7.0).log())
    torch.testing.assert_close(got.logprobs, -torch.full((3,), 7.0).log())


@pytest.mark.parametrize(("temperature", "chunk_size"), [(0.0, 4), (1.0, 0)])
def test_impossible_settings_are_refused(temperature, chunk_size):
    hidden, weight, _, targets = inputs(2)
    with pytest.raises(ValueError, match="must be"):
        token_logprobs(hidden, weight, targets, temperature=temperature, chunk_size=chunk_size)
