"""Chunked log-probabilities against the plain log_softmax."""

import itertools

import pytest
import torch
from effort import FULL
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_watchers import LargestTensor

from async_grpo.model.lm_head import UNCHANGED, Head, Rescaling
from async_grpo.model.logprobs import token_logprobs

RESCALINGS = [UNCHANGED, Rescaling(factor=0.25), Rescaling(factor=1.5, softcap=2.0)]


def plain(hidden, weight, targets, *, temperature, bias=None, rescaling=UNCHANGED):
    logits = rescaling.factor * torch.nn.functional.linear(hidden, weight, bias)
    if rescaling.softcap:
        logits = rescaling.softcap * torch.tanh(logits / rescaling.softcap)
    logprobs = (logits / temperature).log_softmax(-1)
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
    rescaling=st.sampled_from(RESCALINGS),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_equal_log_softmax_for_any_chunk(
    num_tokens, chunk_size, temperature, with_bias, rescaling, seed
):
    hidden, weight, bias, targets = inputs(num_tokens, seed=seed)
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    head_bias = bias if with_bias else None
    expected = plain(
        hidden, weight, targets, temperature=temperature, bias=head_bias, rescaling=rescaling
    )
    head = Head(weight, head_bias, rescaling)
    got = token_logprobs(hidden, head, targets, temperature=temperature, chunk_size=chunk_size)
    factors = torch.linspace(-1, 2, num_tokens, dtype=torch.float64)
    sums = [(factors * value).sum() + value.square().sum() for value in (*expected, *got[:2])]
    for got_value, expected_value in zip(got[:2], expected, strict=True):
        torch.testing.assert_close(got_value, expected_value, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(a + b, leaves) for a, b in (sums[:2], sums[2:])]
    for got_grad, expected_grad in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(got_grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_no_tensor_is_larger_than_one_chunk_of_logits_forward_or_backward():
    hidden, weight, _, targets = inputs(200, vocab=300, hidden=4)
    with LargestTensor() as largest:
        got = token_logprobs(hidden, Head(weight), targets, temperature=0.9, chunk_size=8)
        (got.logprobs.sum() + got.entropy.sum()).backward()
    assert largest.num_elements == 8 * 300
    with LargestTensor() as largest:
        plain(hidden, weight, targets, temperature=0.9)
    assert largest.num_elements == 200 * 300


def test_logits_of_low_precision_are_float32():
    hidden, weight, _, targets = inputs(64, vocab=2000, hidden=16, dtype=torch.bfloat16)
    got = token_logprobs(hidden, Head(weight), targets, temperature=0.7, chunk_size=10)
    exact = plain(hidden.double(), weight.double(), targets, temperature=0.7)
    assert got.logprobs.dtype == got.entropy.dtype == torch.float32
    assert (got.logprobs - exact[0]).abs().max() < 1e-5  # logits in bf16 are off by 0.05
    assert (got.entropy - exact[1]).abs().max() < 1e-5
    got.logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    for leaf in (hidden, weight):
        expected = torch.autograd.grad(exact[0].sum(), leaf, retain_graph=True)[0].double()
        assert (leaf.grad.double() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.gpu
def test_a_device_gives_the_cpu_s_values_and_gradients_in_low_precision():
    """`torch.mm` into float32 is another path there; also with nothing to score."""
    for num_tokens in (64, 0):
        results = []
        for device in ("cpu", "cuda"):
            hidden, weight, bias, targets = (
                tensor.detach().to(device).requires_grad_(tensor.is_floating_point())
                for tensor in inputs(num_tokens, vocab=2000, hidden=16, dtype=torch.bfloat16)
            )
            got = token_logprobs(
                hidden, Head(weight, bias), targets, temperature=0.7, chunk_size=10
            )
            (got.logprobs.sum() + got.entropy.square().sum()).backward()
            grads = [leaf.grad.float().cpu() for leaf in (hidden, weight, bias)]
            results.append([value.detach().cpu() for value in got[:2]] + grads)
        for on_cpu, on_device in zip(*results, strict=True):
            torch.testing.assert_close(on_device, on_cpu, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("used", ["logprobs", "entropy"])
def test_each_output_can_be_used_without_the_other(used):
    hidden, weight, bias, targets = inputs(9)
    got = token_logprobs(hidden, Head(weight, bias), targets, temperature=0.7, chunk_size=4)
    expected = plain(hidden, weight, targets, temperature=0.7, bias=bias)
    leaves = (hidden, weight, bias)
    pairs = zip(
        torch.autograd.grad(getattr(got, used).square().sum(), leaves),
        torch.autograd.grad(expected[used == "entropy"].square().sum(), leaves),
        strict=True,
    )
    for got_grad, expected_grad in pairs:
        torch.testing.assert_close(got_grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_a_bias_of_minus_infinity_excludes_a_token():
    """As if the vocabulary ended before the excluded tokens."""
    hidden, weight, bias, targets = inputs(20, vocab=11)
    targets = targets % 8
    excluded = torch.cat([bias[:8].detach(), torch.full((3,), -torch.inf, dtype=bias.dtype)])
    excluded.requires_grad_()
    got = token_logprobs(hidden, Head(weight, excluded), targets, temperature=0.7, chunk_size=6)
    expected = plain(hidden, weight[:8], targets, temperature=0.7, bias=bias[:8])
    for got_value, expected_value in zip(got[:2], expected, strict=True):
        torch.testing.assert_close(got_value, expected_value, rtol=1e-12, atol=1e-12)
    sums = [values[0].sum() + values[1].square().sum() for values in (got[:2], expected)]
    got_grads = torch.autograd.grad(sums[0], (hidden, weight, excluded))
    expected_grads = torch.autograd.grad(sums[1], (hidden, weight, bias))
    for got_grad, expected_grad in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(got_grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_an_excluded_token_itself_is_impossible():
    hidden, weight, bias, _ = inputs(2)
    bias = bias.detach().index_fill(0, torch.tensor([4]), -torch.inf)
    got = token_logprobs(
        hidden, Head(weight, bias), torch.tensor([4, 3]), temperature=1.0, chunk_size=2
    )
    assert got.logprobs[0] == -torch.inf
    assert got.logprobs[1].isfinite()


@pytest.mark.integration  # for its compiler, a process of its own
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_chunks_give_the_same_values_and_gradients():
    """Full chunks and the rest; at length also one token, none, and a bias."""
    cases = itertools.product((10, 0, 1), (False, True), RESCALINGS)
    for num_tokens, with_bias, rescaling in cases if FULL else [(10, False, RESCALINGS[-1])]:
        hidden, weight, bias, targets = inputs(num_tokens)
        leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
        results = []
        for compile in (False, True):
            got = token_logprobs(
                hidden,
                Head(weight, bias if with_bias else None, rescaling),
                targets,
                temperature=0.7,
                chunk_size=4,
                compile=compile,
            )
            loss = got.logprobs.sum() + got.entropy.square().sum()
            results.append([*got[:2], *torch.autograd.grad(loss, leaves)])
        for plain_value, compiled_value in zip(*results, strict=True):
            torch.testing.assert_close(compiled_value, plain_value, rtol=1e-12, atol=1e-12)


def test_entropy_of_equal_logits_is_log_v():
    hidden, weight = torch.zeros(3, 4), torch.ones(7, 4)
    got = token_logprobs(
        hidden, Head(weight), torch.tensor([0, 3, 6]), temperature=1.0, chunk_size=2
    )
    torch.testing.assert_close(got.entropy, torch.full((3,), 7.0).log())
    torch.testing.assert_close(got.logprobs, -torch.full((3,), 7.0).log())


@pytest.mark.parametrize(("temperature", "chunk_size"), [(0.0, 4), (1.0, 0)])
def test_impossible_settings_are_refused(temperature, chunk_size):
    hidden, weight, _, targets = inputs(2)
    with pytest.raises(ValueError, match="must be"):
        token_logprobs(
            hidden, Head(weight), targets, temperature=temperature, chunk_size=chunk_size
        )
