"""What chance does not meet where the oracle and TRL hold the loss to theirs.

Sums for the metrics, the ends of floats, bounds that are hit exactly, and the averages that the
estimators of the divergence rest on; test_gradient.py and test_trl.py hold every number else.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle import loss_with, make_config, make_sample

from async_grpo.algorithms.grpo_loss import correction_weights, mismatch
from async_grpo.model.collate import collate

LOG2 = math.log(2)
CORRECTED = {"ratio_mode": "on_policy", "aggregation": "token-mean"}


def make_outputs(*samples, **options):
    """(packed samples, options); a sample is the keywords of `make_sample`, by its behaviour."""
    config = make_config(**options)
    made = [make_sample([1], [2] * len(sample["behaviour"]), **sample) for sample in samples]
    packed = collate(
        made,
        aggregation=config.objective.aggregation,
        constant_length=config.objective.constant_length_samples,
        dtype=torch.float64,
    )
    return packed, config


def evaluate(logprobs, outputs, *, old=None):
    """Loss, gradient by log-probability, gradient by entropy: plain numbers."""
    packed, objective = outputs
    lp = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    entropy = torch.full_like(lp, 0.5, requires_grad=True)
    if old is not None:
        given = torch.tensor(old, dtype=torch.float64)
        packed = replace(packed, scores={**packed.scores, "old": given})
    loss = loss_with(objective, lp, entropy, packed).loss
    gradients = torch.autograd.grad(loss, (lp, entropy), allow_unused=True, materialize_grads=True)
    return loss.item(), *(gradient.tolist() for gradient in gradients)


def scored(logprobs):
    values = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    return values, torch.full_like(values, 0.5).detach()


def test_metric_sums_by_hand():
    sample = make_sample([1], [2, 3], behaviour=[-1.0, -2.0])
    packed = collate([sample], aggregation="token-mean", dtype=torch.float64)
    result = loss_with(make_config(ratio_mode="behaviour"), *scored([-1.5, -2.0]), packed)
    mismatch_sums, maxima = mismatch(scored([-1.5, -2.0])[0], packed)
    sums = {name: value.item() for name, value in {**result.sums, **mismatch_sums}.items()}
    assert sums["mismatch_kl_sum"] == pytest.approx(np.exp(-0.5) - 1 + 0.5)
    assert sums["mismatch_ratio_sum"] == pytest.approx(np.exp(-0.5) + 1)
    assert sums["mismatch_ratio_square_sum"] == pytest.approx(np.exp(-1) + 1)
    assert sums["policy_loss_sum"] == result.loss.item() == pytest.approx(-np.exp(-0.5) - 1)
    assert maxima["mismatch_max"].item() == 0.5
    assert maxima["mismatch_ratio_max"].item() == 1.0


def test_the_sum_of_kl_has_the_sample_s_weight_and_no_coefficient():
    sample = make_sample([1], [2, 3], reference=[-1.0, -3.0], advantage=0.0)
    packed = collate([sample], aggregation="sample-mean", dtype=torch.float64)
    objective = make_config(ratio_mode="on_policy", kl_coefficient=0.1, kl_estimator="k2")
    result = loss_with(objective, *scored([-2.0, -2.0]), packed)
    assert result.sums["kl_sum"].item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("options", "clipped"),
    [
        ({"clip_high": 0.3}, 1),  # 4 is above 1.3
        ({"clip_high": 0.3, "ratio_level": "sequence"}, 2),  # their geometric mean 2 is
        ({"clip_high": 3.5}, 0),
        ({"ratio_mode": "on_policy"}, 0),
        ({"policy_loss": "cispo", "clip_high": 0.3, "clip_low": 1.0}, 1),
        ({"policy_loss": "cispo", "clip_high": 9.0, "clip_low": 1.0}, 0),
    ],
)
def test_clipped_tokens_are_those_whose_gradient_was_cut(options, clipped):
    sample = make_sample([1], [2, 3], behaviour=[-2.0, -2.0], advantage=1.0)
    packed = collate([sample], aggregation="sample-mean", dtype=torch.float64)
    objective = make_config(**{"ratio_mode": "behaviour"} | options)
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


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_bounds_of_a_mask_belong_to_what_is_kept(level):
    """At 1, which exp() hits exactly; options refuse a bound as near to 1 as that."""
    packed, config = make_outputs(
        {"behaviour": [-2.0], "advantage": 1.0},
        importance_correction="mask", correction_level=level, **CORRECTED,
    )  # fmt: skip
    for low, high in ((1.0, 3.0), (0.5, 1.0)):
        bounds = replace(config.objective, correction_low=low, correction_high=high)
        outside = -2.0 + (1e-9 if high == 1.0 else -1e-9)
        for old, weight in ((-2.0, 1.0), (outside, 0.0)):
            olds = torch.tensor([old], dtype=torch.float64)
            assert correction_weights(olds, packed, bounds)[0].item() == weight


@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_a_long_output_s_correction_may_overflow_and_is_cut_all_the_same(kind):
    """e^(200 * 5) has no float; float32 ends at e^88."""
    outputs = make_outputs(
        {"behaviour": [-6.0] * 200, "advantage": 1.0},
        importance_correction=kind, correction_level="sequence", **CORRECTED,
    )  # fmt: skip
    loss, gradient, _ = evaluate([-1.0] * 200, outputs)
    weight = 2.0 if kind == "truncate" else 0.0
    assert gradient == [-weight] * 200
    assert loss == -weight * 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_beyond_floats_is_cut_not_lost(dtype):
    """The engine gave a token 1e-440: where the clip cuts, the gradient is 0, not nan."""
    packed, objective = make_outputs(
        {"behaviour": [-1000.0], "advantage": 1.0}, ratio_mode="behaviour"
    )
    logprobs = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
    result = loss_with(objective, logprobs, torch.zeros(1, dtype=dtype), packed)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-1.2)
    assert logprobs.grad.tolist() == [0.0]


@pytest.mark.parametrize("estimator", ["k3", "k3_iw"])
@pytest.mark.parametrize(
    ("behaviour", "reference", "num_far"),
    [(-100.0, -1.5, 1), (-1.5, 99.0, 1), (-100.0, 99.0, 1), (-1.5, -99.0, 0)],
)
def test_a_penalty_beyond_floats_is_clamped_and_counted(estimator, behaviour, reference, num_far):
    """float32 ends at e^88; the second token is as likely as ever."""
    sample = make_sample([1], [2, 3], behaviour=[behaviour, -1.0], reference=[reference, -1.0])
    packed = collate([sample], aggregation="token-mean")
    objective = make_config(ratio_mode="behaviour", kl_coefficient=0.1, kl_estimator=estimator)
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    result = loss_with(objective, logprobs, torch.zeros(2), packed)
    result.loss.backward()
    assert result.loss.dtype == torch.float32
    assert result.loss.isfinite() and logprobs.grad.isfinite().all()
    assert result.sums["far_tokens"] == num_far


def test_a_token_far_above_the_reference_is_still_pulled_back():
    outputs = make_outputs(
        {"behaviour": [-1.0], "reference": [-100.0], "advantage": 0.0},
        ratio_mode="behaviour", kl_coefficient=0.1, kl_estimator="k3",
    )  # fmt: skip
    assert evaluate([-1.0], outputs)[1] == pytest.approx([0.1])


def test_without_a_penalty_in_the_loss_there_is_no_kl_to_report():
    sample = {"behaviour": [-1.0], "advantage": 1.0, "reference": [-3.0]}
    for options, is_there in (
        ({}, False),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, False),
        ({"kl_coefficient": 0.1}, True),
    ):
        packed, objective = make_outputs(sample, ratio_mode="behaviour", **options)
        result = loss_with(objective, torch.tensor([-1.0]), torch.zeros(1), packed)
        assert ("kl_sum" in result.sums) == is_there


def expected_gradients(estimator, *, mode):
    """What the penalty's gradient by logits is on average, and that of the divergence itself.

    A vocabulary of five: the average over what the engine (`behaviour`) or the policy samples is a
    sum with its probabilities as weights.
    """
    rng = np.random.default_rng(5)
    logits = torch.tensor(rng.normal(size=5), requires_grad=True)
    logprobs = logits.log_softmax(0)
    behaviour, reference = rng.normal(-1.6, 0.5, (2, 5)).astype(np.float32)
    packed, objective = make_outputs(
        {"behaviour": behaviour, "reference": reference, "advantage": 0.0},
        ratio_mode=mode, kl_coefficient=1.0, kl_estimator=estimator,
    )  # fmt: skip
    samples = torch.from_numpy(behaviour).double() if mode == "behaviour" else logprobs.detach()
    packed = replace(packed, weights=samples.exp())
    loss = loss_with(objective, logprobs, torch.zeros(5), packed).loss
    divergence = (logprobs.exp() * (logprobs - torch.from_numpy(reference))).sum()
    return [
        torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (loss, divergence)
    ]


@pytest.mark.parametrize(
    ("estimator", "mode"), [("k3_iw", "behaviour"), ("k3_iw", "on_policy"), ("k2", "on_policy")]
)
def test_the_penalty_s_gradient_is_the_divergence_s_on_average(estimator, mode):
    got, expected = expected_gradients(estimator, mode=mode)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("estimator", "mode"), [("k3", "on_policy"), ("k2", "behaviour")])
def test_other_estimators_are_biased_there(estimator, mode):
    """k3 in the loss has the gradient of KL(reference || policy); k2 needs the policy's samples."""
    got, expected = expected_gradients(estimator, mode=mode)
    assert (got - expected).abs().max() > 0.01
