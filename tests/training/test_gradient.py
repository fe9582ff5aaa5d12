"""The project's first promise: any streaming of a batch gives the gradient of one float64 pass."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle_gradient, random_samples, relative_difference, tiny_model

from async_grpo.model.collate import collate
from async_grpo.model.policy import PolicyModel, hf_named_parameters
from async_grpo.training.loss import Objective, grpo_loss

MODELS = {
    (tied, dtype): PolicyModel(tiny_model(tied=tied, dtype=dtype))
    for tied in (True, False)
    for dtype in (torch.float32, torch.float64)
}
FORMULAS = st.fixed_dictionaries(
    {
        "denominator": st.sampled_from(["on_policy", "behaviour"]),
        "clip": st.tuples(st.floats(0.05, 0.4), st.floats(0.05, 0.4)),
        "kl_coefficient": st.sampled_from([0.0, 0.1]),
        "kl_estimator": st.sampled_from(["k2", "k3"]),
        "aggregation": st.sampled_from(["sample-mean", "token-mean", "constant"]),
        "temperature": st.sampled_from([1.0, 0.7]),
    }
)


def partition(rng, samples, num_fillers):
    """The samples in any order, cut anywhere, with fillers anywhere between."""
    order = rng.permutation(len(samples))
    num_cuts = rng.integers(0, len(samples) + 1)
    cuts = np.sort(rng.integers(0, len(samples) + 1, size=num_cuts))
    parts = [list(part) for part in np.split(order, cuts)] + [[]] * num_fillers
    rng.shuffle(parts)
    return [[samples[index] for index in part] for part in parts]


def streamed_gradient(policy, minibatches, *, formula, chunk_size, num_samples, num_tokens):
    """Sum of the minibatches' gradients, wherever they ran, divided once."""
    dtype = policy.model.dtype
    objective = Objective(
        denominator=formula["denominator"],
        clip_low=formula["clip"][0],
        clip_high=formula["clip"][1],
        kl_coefficient=formula["kl_coefficient"],
        kl_estimator=formula["kl_estimator"],
    )
    policy.zero_grad()
    for samples in minibatches:
        packed = collate(
            samples, aggregation=formula["aggregation"], constant_length=17, dtype=dtype
        )
        scored = policy(packed, temperature=formula["temperature"], chunk_size=chunk_size)
        grpo_loss(scored.logprobs, scored.entropy, packed, objective=objective).loss.backward()
    divisor = num_tokens if formula["aggregation"] == "token-mean" else num_samples
    return {name: p.grad.double() / divisor for name, p in hf_named_parameters(policy)}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 6),
    num_fillers=st.integers(0, 2),
    chunk_size=st.integers(1, 60),
    tied=st.booleans(),
    formula=FORMULAS,
)
def test_gradient_is_the_oracle_s_for_any_streaming(
    dtype, tolerance, seed, count, num_fillers, chunk_size, tied, formula
):
    rng = np.random.default_rng(seed)
    policy = MODELS[tied, dtype]
    twin = MODELS[tied, torch.float64].model
    samples = random_samples(rng, count, temperature=formula["temperature"], model=twin)
    num_tokens = sum(sample.num_trained_tokens for sample in samples)
    if num_tokens == 0:
        return
    expected = oracle_gradient(policy.model, samples, constant_length=17, **formula)
    got = streamed_gradient(
        policy,
        partition(rng, samples, num_fillers),
        formula=formula,
        chunk_size=chunk_size,
        num_samples=count,
        num_tokens=num_tokens,
    )
    assert relative_difference(got, expected) < tolerance


def test_a_filler_s_gradient_is_exactly_zero():
    policy = MODELS[True, torch.float32]
    formula = {
        "denominator": "behaviour",
        "clip": (0.2, 0.2),
        "kl_coefficient": 0.1,
        "kl_estimator": "k3",
        "aggregation": "sample-mean",
        "temperature": 1.0,
    }
    gradient = streamed_gradient(
        policy, [[]], formula=formula, chunk_size=4, num_samples=1, num_tokens=1
    )
    assert all(torch.equal(value, torch.zeros_like(value)) for value in gradient.values())
