"""A head term of a user's file: a whole divergence, exact for any chunk, minibatch and rank."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dense_kl import NUM_TOKENS, KlToOther
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import make_config, oracle_twin, random_samples, relative_difference, tiny_model
from ranks import run_ranks
from tensor_watchers import LargestTensor
from torch.distributed.device_mesh import init_device_mesh
from trained import HERE, OPTIONS, assert_same_parameters, make_learner, make_oracle, train

from async_grpo.algorithms.find import find_algorithm
from async_grpo.model.collate import collate
from async_grpo.model.lm_head import Head, Rescaling
from async_grpo.model.logprobs import token_logprobs
from async_grpo.model.policy import PolicyModel, hf_named_parameters
from async_grpo.training.fsdp import shard

CONFIG = make_config(algorithm=f"{HERE}/dense_kl.py:DenseKl", **OPTIONS)


def make_samples(count, seed=0):
    """Samples with a second distribution over the whole vocabulary at every token."""
    rng = np.random.default_rng(seed)
    samples = random_samples(rng, count, model=oracle_twin(tiny_model(tied=True)))
    found = []
    for sample in samples:
        size = (len(sample.episode.rows[0].token_ids), NUM_TOKENS)
        other = torch.from_numpy(rng.normal(size=size)).log_softmax(-1).float().numpy()
        found.append(replace(sample, scores={"other": other}))
    return found


def oracle_loss(model, samples):
    """Σ over trained tokens of -lp + KL / 2, each from the whole float64 distribution."""
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        (row,) = sample.episode.rows
        ids = np.concatenate([row.prompt_token_ids, row.token_ids]).astype(np.int64)
        logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
        logprobs = logits.log_softmax(-1)[len(row.prompt_token_ids) - 1 : -1]
        other = torch.from_numpy(sample.scores["other"]).double()
        for t in np.flatnonzero(row.loss_mask):
            divergence = (logprobs[t].exp() * (logprobs[t] - other[t])).sum()
            total = total - logprobs[t, row.token_ids[t]] + 0.5 * divergence
    return total


@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.integers(0, 9),
    chunk_size=st.integers(1, 12),
    temperature=st.floats(0.3, 2.0),
    with_bias=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 1000),
)
def test_value_and_gradient_equal_autograd_s_for_any_chunk(
    num_tokens, chunk_size, temperature, with_bias, softcap, seed
):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    leaves = (random(num_tokens, 5), random(11, 5), *((random(11),) if with_bias else ()))
    hidden, weight, bias = leaves if with_bias else (*leaves, None)
    other = random(num_tokens, 11).log_softmax(-1).detach()
    targets = torch.randint(11, (num_tokens,), generator=generator)
    got = token_logprobs(
        hidden, Head(weight, bias, Rescaling(softcap=softcap)), targets,
        temperature=temperature, chunk_size=chunk_size, terms=(KlToOther(),), rows={"other": other},
    )  # fmt: skip
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    logprobs = logits.log_softmax(-1)
    expected = KlToOther().value(logprobs, {"other": other})
    torch.testing.assert_close(got.terms["kl"], expected, rtol=1e-12, atol=1e-12)
    chosen = logprobs[torch.arange(num_tokens), targets]
    factors = torch.linspace(-1, 2, num_tokens, dtype=torch.float64)
    sums = [(factors * kl).sum() + kl.square().sum() + (factors * lp).sum()
            for kl, lp in ((got.terms["kl"], got.logprobs), (expected, chosen))]  # fmt: skip
    gradients = [torch.autograd.grad(value, leaves) for value in sums]
    for got_grad, expected_grad in zip(*gradients, strict=True):
        torch.testing.assert_close(got_grad, expected_grad, rtol=1e-11, atol=1e-11)


def test_with_a_term_no_tensor_is_larger_than_one_chunk_of_logits():
    hidden, weight = (torch.randn(size, 4, requires_grad=True) for size in (200, 300))
    other = torch.zeros(200, 300)
    with LargestTensor() as largest:
        targets = torch.zeros(200, dtype=torch.int64)
        got = token_logprobs(
            hidden, Head(weight), targets, temperature=0.9, chunk_size=8, terms=(Uniform(),)
        )
        got.terms["uniform"].sum().backward()
    assert other.numel() > largest.num_elements == 8 * 300


class Uniform:
    """Mean log-probability of all tokens: reads no rows."""

    name = "uniform"

    def value(self, logprobs, rows):
        return logprobs.mean(-1)

    def gradient(self, logprobs, rows):
        return torch.full_like(logprobs, 1 / logprobs.shape[-1])


def test_it_trains_as_the_oracle_does():
    learner = make_learner(CONFIG)
    model, optimizer = make_oracle()
    for batch in range(3):
        samples = make_samples(5, seed=batch)
        num_tokens = sum(sample.num_trained_tokens for sample in samples)
        loss = oracle_loss(model, samples) / num_tokens
        optimizer.zero_grad()
        loss.backward()
        result = train(learner, samples, batch=batch)
        optimizer.step()
        assert result.metrics["loss_sum"] / num_tokens == pytest.approx(loss.item(), rel=1e-6)
        assert result.metrics["dense_kl_sum"] > 0
        assert_same_parameters(learner, model)


def gradient_of_ranks(rank):
    """The summed gradient of this rank's samples and an empty minibatch, sharded over two."""
    algorithm = find_algorithm(CONFIG)
    policy = PolicyModel(tiny_model(tied=True, dtype=torch.float64))
    shard(policy, init_device_mesh("cpu", (2,)))
    samples = make_samples(5)
    for part in (samples[:3], []) if rank else ([], samples[3:]):
        packed = collate(
            part, aggregation="token-mean", scores=algorithm.score_columns, dtype=torch.float64
        )
        scored = policy(packed, temperature=1.0, chunk_size=3, terms=algorithm.terms)
        algorithm.loss(scored, packed).loss.backward()
    return {n: p.grad.full_tensor() for n, p in hf_named_parameters(policy)}


def test_the_gradient_is_the_oracle_s_through_shards_and_fillers(tmp_path):
    found = run_ranks(gradient_of_ranks, num_ranks=2, folder=tmp_path)
    model = oracle_twin(tiny_model(tied=True, dtype=torch.float64))
    oracle_loss(model, make_samples(5)).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradient in found:
        assert relative_difference(gradient, expected) < 1e-12
