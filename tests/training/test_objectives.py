"""Ratios, clips and corrections at numbers worked out by hand."""

import math

import pytest
import torch
from oracle import loss_with
from worked import LOG2, evaluate, make_outputs


def one_token(ratio, *, advantage, **options):
    """Loss and gradient of a token whose policy/engine ratio is `ratio`."""
    outputs = make_outputs(
        {"behaviour": [-2.0], "advantage": advantage}, ratio_mode="behaviour", **options
    )
    loss, gradient, _ = evaluate([-2.0 + math.log(ratio)], outputs)
    return loss, gradient[0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.279, 2.0, -2.558, -2.558),  # inside: -rA, and its derivative by lp is the same
        (1.281, 2.0, -2.56, 0.0),  # above 1.28: the gain is capped
        (0.5, 2.0, -1.0, -1.0),  # below 0.8 with A > 0: not clipped, there is something to regain
        (0.801, -2.0, 1.602, 1.602),
        (0.799, -2.0, 1.6, 0.0),  # below 0.8: no more to gain from A < 0
        (9.0, -2.0, 18.0, 18.0),  # above with A < 0: unbounded
        (9.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_clip_cuts_on_the_side_that_gains(ratio, advantage, loss, gradient):
    got = one_token(ratio, advantage=advantage, clip_low=0.2, clip_high=0.28)
    assert got == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    ("dual_clip", "ratio", "advantage", "loss", "gradient"),
    [
        (3.0, 2.99, -1.0, 2.99, 2.99),
        (3.0, 3.01, -1.0, 3.0, 0.0),  # max(min(rA, clip(r)A), cA) = cA
        (3.0, 0.5, -1.0, 0.8, 0.0),  # the ordinary clip still holds
        (3.0, 3.01, 1.0, -1.2, 0.0),  # A > 0: nothing new
        (1.1, 1.15, -1.0, 1.1, 0.0),  # a bound inside the clip counts, for A < 0 only
        (1.1, 1.15, 1.0, -1.15, -1.15),
    ],
)
def test_the_dual_clip_bounds_negative_advantages(dual_clip, ratio, advantage, loss, gradient):
    got = one_token(ratio, advantage=advantage, dual_clip=dual_clip)
    assert got == pytest.approx((loss, gradient))


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize(("ratio", "weight"), [(9.0, 4.0), (1.7, 1.7), (0.1, 0.25)])
def test_cispo_clips_the_weight_and_never_loses_a_gradient(ratio, weight, advantage):
    options = {"policy_loss": "cispo", "clip_low": 0.75, "clip_high": 3.0}
    loss, gradient = one_token(ratio, advantage=advantage, **options)
    assert gradient == pytest.approx(-weight * advantage)
    assert loss == pytest.approx(-weight * advantage * (-2.0 + math.log(ratio)))


def test_gspo_has_one_ratio_a_sample():
    """Token ratios 4, 1 and a masked 100: the sample's is 2. Its neighbour's are 1/2: 1/2."""
    behaviour = [-2.0, -1.0, -3.0]
    outputs = make_outputs(
        {"behaviour": behaviour, "mask": [1, 0, 1], "advantage": 3.0},
        {"behaviour": [-2.0], "advantage": 1.0},
        ratio_mode="behaviour", ratio_level="sequence", clip_high=1.5, clip_low=0.9,
    )  # fmt: skip
    loss, gradient, _ = evaluate([-2.0 + 2 * LOG2, -3.0, -2.0 - LOG2], outputs)
    assert loss == pytest.approx(-2 * 3 - 0.5)
    assert gradient == pytest.approx([-2 * 3 / 2, -2 * 3 / 2, -0.5])


def test_gspo_cuts_a_whole_sample_or_nothing_of_it():
    outputs = make_outputs(
        {"behaviour": [-2.0, -2.0], "advantage": 1.0},
        {"behaviour": [-2.0, -2.0], "advantage": 1.0},
        ratio_mode="behaviour", ratio_level="sequence", clip_high=0.5,
    )  # fmt: skip
    over = [-2.0 + 2 * LOG2, -2.0]  # 4 and 1: 2, above 1.5
    under = [-2.0 + 2 * LOG2, -2.0 - 2 * LOG2]  # 4 and 1/4: 1
    loss, gradient, _ = evaluate(over + under, outputs)
    assert loss == pytest.approx(-1.5 - 1.0)
    assert gradient == pytest.approx([0.0, 0.0, -0.5, -0.5])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_on_policy_a_ratio_is_one_and_a_clip_is_inert(level):
    outputs = make_outputs(
        {"behaviour": [-9.0, -9.0], "advantage": 2.0},
        ratio_mode="on_policy", ratio_level=level, clip_low=0.0, clip_high=0.0,
    )  # fmt: skip
    loss, gradient, _ = evaluate([-1.0, -2.0], outputs)
    assert loss == pytest.approx(-2.0)
    assert gradient == pytest.approx([-1.0, -1.0])


def test_decoupled_clips_against_the_batch_s_start_and_corrects_from_there():
    """Policy/start 1.1 and 2, start/engine 1.5 and 0.4; the second is cut at 1.2, but weighted."""
    outputs = make_outputs(
        {"behaviour": [-3.0, -3.0], "advantage": 1.0},
        ratio_mode="decoupled", aggregation="token-mean",
        importance_correction="truncate", correction_high=1.25,
    )  # fmt: skip
    start = [-3.0 + math.log(1.5), -3.0 + math.log(0.4)]
    now = [start[0] + math.log(1.1), start[1] + math.log(2.0)]
    loss, gradient, _ = evaluate(now, outputs, old=start)
    assert loss == pytest.approx(-1.25 * 1.1 - 0.4 * 1.2)
    assert gradient == pytest.approx([-1.25 * 1.1, 0.0])


def test_decoupled_in_a_batch_s_first_step_starts_where_the_policy_is():
    options = {"aggregation": "token-mean", "importance_correction": "truncate"}
    sample = {"behaviour": [-3.0, -3.0], "advantage": 1.0}
    now = [-3.0 + LOG2, -2.0]
    decoupled = evaluate(now, make_outputs(sample, ratio_mode="decoupled", **options))
    on_policy = evaluate(now, make_outputs(sample, ratio_mode="on_policy", **options))
    assert (
        decoupled
        == on_policy
        == evaluate(now, make_outputs(sample, ratio_mode="decoupled", **options), old=now)
    )
    assert decoupled[1] == pytest.approx([-2.0, -2.0])  # e is cut at the cap of 2


CORRECTED = {"ratio_mode": "on_policy", "aggregation": "token-mean"}


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("truncate", [0.1, 0.6, 1.0, 1.9, 2.0]), ("mask", [0.0, 0.6, 1.0, 1.9, 0.0])],
)
def test_a_token_correction_by_hand(kind, weights):
    ratios = [0.1, 0.6, 1.0, 1.9, 7.0]
    outputs = make_outputs(
        {"behaviour": [-3.0] * 5, "advantage": 1.0},
        importance_correction=kind, correction_low=0.5, correction_high=2.0, **CORRECTED,
    )  # fmt: skip
    loss, gradient, _ = evaluate([-3.0 + math.log(ratio) for ratio in ratios], outputs)
    assert gradient == pytest.approx([-weight for weight in weights])
    assert loss == pytest.approx(-sum(weights))


def test_a_sequence_correction_multiplies_its_tokens_ratios():
    """4 times 1/8 is 1/2 for both tokens; 2 times a masked 1000 is 2."""
    outputs = make_outputs(
        {"behaviour": [-3.0, -3.0], "advantage": 1.0},
        {"behaviour": [-3.0, -9.0], "mask": [1, 0], "advantage": 1.0},
        importance_correction="truncate", correction_level="sequence", **CORRECTED,
    )  # fmt: skip
    _, gradient, _ = evaluate([-3.0 + 2 * LOG2, -3.0 - 3 * LOG2, -3.0 + LOG2], outputs)
    assert gradient == pytest.approx([-0.5, -0.5, -2.0])


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_bounds_of_a_mask_belong_to_what_is_kept(level):
    """At 1, which exp() hits exactly; options refuse a bound as near to 1 as that."""
    packed, objective = make_outputs(
        {"behaviour": [-2.0], "advantage": 1.0},
        importance_correction="mask", correction_level=level, **CORRECTED,
    )  # fmt: skip
    for low, high in ((1.0, 3.0), (0.5, 1.0)):
        outputs = packed, objective.but(correction_low=low, correction_high=high)
        _, at_bound, _ = evaluate([-2.0], outputs)
        outside = -2.0 + (1e-9 if high == 1.0 else -1e-9)
        _, beyond, _ = evaluate([outside], outputs)
        assert (at_bound, beyond) == ([-1.0], [0.0])


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


def test_a_correction_weights_the_policy_s_loss_alone():
    """Ratio 1/4 is masked: what is left is KL and entropy, in full."""
    outputs = make_outputs(
        {"behaviour": [-2.0], "advantage": 1.0, "reference": [-3.0]},
        importance_correction="mask", kl_coefficient=0.1, kl_estimator="k2",
        entropy_coefficient=0.01, **CORRECTED,
    )  # fmt: skip
    lp = -2.0 - 2 * LOG2
    loss, gradient, by_entropy = evaluate([lp], outputs)
    assert loss == pytest.approx(0.1 * (lp + 3) ** 2 / 2 - 0.01 * 0.5)
    assert gradient == pytest.approx([0.1 * (lp + 3)])
    assert by_entropy == pytest.approx([-0.01])


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
