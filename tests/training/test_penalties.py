"""KL and entropy at numbers worked out by hand, and the identities that the estimators rest on."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle import loss_with, make_config, make_sample
from worked import LOG2, evaluate, make_outputs

from async_grpo.model.collate import collate


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"aggregation": "sample-mean"}, [1 / 2, 1 / 2, 1]),
        ({"aggregation": "token-mean"}, [1, 1, 1]),
        ({"aggregation": "constant", "constant_length_samples": 8}, [1 / 8] * 3),
    ],
)
def test_every_term_has_the_sample_s_weight(options, weights):
    outputs = make_outputs(
        {"behaviour": [-2.0, -2.0], "advantage": 2.0, "reference": [-3.0, -3.0]},
        {"behaviour": [-2.0], "advantage": 2.0, "reference": [-3.0]},
        ratio_mode="behaviour", kl_coefficient=0.1, kl_estimator="k2", entropy_coefficient=0.03,
        **options,
    )  # fmt: skip
    loss, gradient, by_entropy = evaluate([-2.0, -2.0, -2.0], outputs)
    assert loss == pytest.approx(sum(weights) * (-2.0 + 0.1 * 0.5 - 0.03 * 0.5))
    assert gradient == pytest.approx([weight * (-2.0 + 0.1) for weight in weights])
    assert by_entropy == pytest.approx([-0.03 * weight for weight in weights])


@pytest.mark.parametrize(
    ("estimator", "penalty", "derivative"),
    [
        # policy/reference 2, policy/engine 1/2
        ("k2", LOG2**2 / 2, LOG2),
        ("k3", 0.5 + LOG2 - 1, 1 - 0.5),
        ("k3_iw", 0.5 * (0.5 + LOG2 - 1), 0.5 * LOG2),
    ],
)
def test_kl_estimators_by_hand(estimator, penalty, derivative):
    outputs = make_outputs(
        {"behaviour": [-1.0], "advantage": 0.0, "reference": [-1.0 - 2 * LOG2]},
        ratio_mode="behaviour", kl_coefficient=0.1, kl_estimator=estimator,
    )  # fmt: skip
    loss, gradient, _ = evaluate([-1.0 - LOG2], outputs)
    # Engine and reference are recorded in float32.
    assert loss == pytest.approx(0.1 * penalty, rel=1e-6)
    assert gradient == pytest.approx([0.1 * derivative], rel=1e-6)


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


def test_k1_would_pull_nowhere_in_the_loss_and_is_not_there():
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    k1 = (logprobs.exp().detach() * (logprobs - torch.tensor([-1.0, -0.5, -2.0]))).sum()
    torch.testing.assert_close(
        torch.autograd.grad(k1, logits)[0], torch.zeros_like(logits), rtol=0, atol=1e-15
    )
    sample = {"behaviour": [-1.0, -2.0], "advantage": 1.0, "reference": [-3.0, -4.0]}
    options = {"ratio_mode": "behaviour", "kl_estimator": "k1"}
    with_penalty = evaluate([-1.5, -2.0], make_outputs(sample, kl_coefficient=0.5, **options))
    assert with_penalty == evaluate([-1.5, -2.0], make_outputs(sample, **options))
