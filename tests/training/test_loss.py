"""The loss terms and metric sums against numbers and against what they estimate."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import loss_with, make_config, make_sample

from async_grpo.algorithms.grpo_loss import kl_penalty, mismatch
from async_grpo.model.collate import collate

PLAIN = make_config(ratio_mode="behaviour", clip_low=0.2, clip_high=0.3)


def scored(logprobs):
    values = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    return values, torch.full_like(values, 0.5).detach()


def test_on_policy_gradient_is_minus_weight_times_advantage_and_nothing_is_clipped():
    samples = [
        make_sample([1], [2, 3], behaviour=[-9, -9], advantage=2.0),
        make_sample([1], [2], behaviour=[-9], advantage=-1.0),
    ]
    packed = collate(samples, aggregation="sample-mean", dtype=torch.float64)
    objective = make_config(ratio_mode="on_policy")
    logprobs, entropy = scored([-1.0, -2.0, -3.0])
    result = loss_with(objective, logprobs, entropy, packed)
    result.loss.backward()
    assert logprobs.grad.tolist() == [-1.0, -1.0, 1.0]
    assert result.sums["clipped_tokens"] == 0


def test_behaviour_ratio_is_clipped_on_the_side_that_gains():
    ratios = [1.5, 0.5, 1.5, 0.5]
    sample = make_sample([1], [2, 3, 4, 5], behaviour=[0, 0, 0, 0], advantage=1.0)
    packed = collate([sample], aggregation="token-mean", dtype=torch.float64)
    packed.advantages.copy_(torch.tensor([1.0, 1.0, -1.0, -1.0]))
    logprobs, entropy = scored(np.log(ratios))
    result = loss_with(PLAIN, logprobs, entropy, packed)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-1.3 - 0.5 + 1.5 + 0.8)
    assert logprobs.grad.tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0])
    assert result.sums["clipped_tokens"] == 2


@given(st.lists(st.floats(0.05, 1.0), min_size=2, max_size=5), st.integers(0, 2**16))
def test_k3_is_never_negative_and_averages_to_the_divergence(weights, seed):
    policy = torch.tensor(weights, dtype=torch.float64)
    policy /= policy.sum()
    reference = torch.rand(
        len(weights), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    reference = (reference + 0.01) / (reference + 0.01).sum()
    k3 = kl_penalty(policy.log(), reference.log(), estimator="k3")
    divergence = (policy * (policy / reference).log()).sum()
    assert (k3 >= 0).all()
    torch.testing.assert_close((policy * k3).sum(), divergence, rtol=1e-12, atol=1e-12)


def test_gradient_of_k2_averages_to_the_divergence_s():
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    divergence = (logprobs.exp() * (logprobs - reference)).sum()
    expected = torch.autograd.grad(divergence, logits, retain_graph=True)[0]
    k2 = (logprobs.exp().detach() * kl_penalty(logprobs, reference, estimator="k2")).sum()
    torch.testing.assert_close(torch.autograd.grad(k2, logits)[0], expected)


def test_kl_enters_with_its_coefficient_and_the_sample_s_weight():
    sample = make_sample([1], [2, 3], reference=[-1.0, -3.0], advantage=0.0)
    packed = collate([sample], aggregation="sample-mean", dtype=torch.float64)
    objective = make_config(ratio_mode="on_policy", kl_coefficient=0.1, kl_estimator="k2")
    result = loss_with(objective, *scored([-2.0, -2.0]), packed)
    assert result.sums["kl_sum"].item() == pytest.approx(0.5)
    assert result.loss.item() == pytest.approx(0.05)


def test_metric_sums_by_hand():
    sample = make_sample([1], [2, 3], behaviour=[-1.0, -2.0])
    packed = collate([sample], aggregation="token-mean", dtype=torch.float64)
    result = loss_with(PLAIN, *scored([-1.5, -2.0]), packed)
    mismatch_sums, maxima = mismatch(scored([-1.5, -2.0])[0], packed)
    sums = {name: value.item() for name, value in {**result.sums, **mismatch_sums}.items()}
    assert sums["mismatch_kl_sum"] == pytest.approx(np.exp(-0.5) - 1 + 0.5)
    assert sums["mismatch_ratio_sum"] == pytest.approx(np.exp(-0.5) + 1)
    assert sums["mismatch_ratio_square_sum"] == pytest.approx(np.exp(-1) + 1)
    assert sums["policy_loss_sum"] == result.loss.item() == pytest.approx(-np.exp(-0.5) - 1)
    assert maxima["mismatch_max"].item() == 0.5
    assert maxima["mismatch_ratio_max"].item() == 1.0


@pytest.mark.parametrize(
    ("options", "clipped"),
    [
        ({"clip_high": 0.3}, 1),  # 4 is above 1.3
        ({"clip_high": 0.3, "ratio_level": "sequence"}, 2),  # their geometric mean 2 is
        ({"clip_high": 3.5}, 0),
        ({"policy_loss": "cispo", "clip_high": 0.3, "clip_low": 1.0}, 1),
        ({"policy_loss": "cispo", "clip_high": 9.0, "clip_low": 1.0}, 0),
    ],
)
def test_clipped_tokens_are_those_whose_gradient_was_cut(options, clipped):
    sample = make_sample([1], [2, 3], behaviour=[-2.0, -2.0], advantage=1.0)
    packed = collate([sample], aggregation="sample-mean", dtype=torch.float64)
    objective = make_config(ratio_mode="behaviour", **options)
    result = loss_with(objective, *scored([-2.0 + np.log(4), -2.0]), packed)
    assert result.sums["clipped_tokens"] == clipped


def test_a_dual_clip_counts_as_clipped():
    sample = make_sample([1], [2, 3], behaviour=[-2.0, -2.0], advantage=-1.0)
    packed = collate([sample], aggregation="sample-mean", dtype=torch.float64)
    objective = make_config(ratio_mode="behaviour", dual_clip=3.0)
    result = loss_with(objective, *scored([-2.0 + np.log(4), -2.0]), packed)
    assert result.sums["clipped_tokens"] == 1


@pytest.mark.parametrize(
    ("kind", "level", "corrected"),
    [
        ("none", "token", 0),
        ("truncate", "token", 1),  # trainer/engine 4, 1/3: 4 is above 2
        ("mask", "token", 2),
        ("truncate", "sequence", 0),  # 4/3
        ("mask", "sequence", 0),
    ],
)
def test_corrected_tokens_are_those_whose_weight_was_cut(kind, level, corrected):
    sample = make_sample([1], [2, 3], behaviour=[-3.0, -3.0])
    packed = collate([sample], aggregation="sample-mean", dtype=torch.float64)
    objective = make_config(
        ratio_mode="on_policy", importance_correction=kind, correction_level=level
    )
    result = loss_with(objective, *scored([-3 + np.log(4), -3 - np.log(3)]), packed)
    assert result.sums["corrected_tokens"] == corrected


def test_a_filler_adds_nothing_to_any_sum():
    packed = collate([], aggregation="sample-mean", scores={"reference": 0})
    objective = make_config(ratio_mode="behaviour", kl_coefficient=0.1)
    result = loss_with(objective, *scored([]), packed)
    sums, maxima = mismatch(scored([])[0], packed)
    assert not any(value.item() for part in (result.sums, sums, maxima) for value in part.values())
