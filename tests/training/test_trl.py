"""Losses and gradients equal those of TRL 1.16, where both define the same thing.

TRL's own code runs: `GRPOTrainer._compute_loss` on an object with the attributes that it reads,
and the blocks of `_generate_and_score_completions` that make the weights of the vLLM correction
and the advantages, lifted by their syntax tree. float64, to 1e-12.

Where they do not define the same thing, a test shows that they differ, and how:

- `grpo`, `bnpo` and `dr_grpo` divide by what one device sees in one micro-batch and average over
  those; ours divides once by the whole step. `bnpo` depends on the partition, `dapo` does not.
- `delta` bounds the ratio on both sides of the advantage, the dual clip (1912.09729) only where it
  is negative: the same as long as the bound is above 1 + clip_high.
- `cispo`'s `epsilon_high` is the bound itself, ours is above 1; TRL has no lower bound.
- The entropy bonus is a mean over tokens whatever the aggregation; ours has the aggregation's
  weights, so they agree under `token-mean`.
- `use_bias_correction_kl` weights k3 by the sequence's ratio when that is the level; ours always by
  the token's, for which the identity of DeepSeek-V3.2 holds.
- `*_truncate` may also have a lower bound; ours has none.
- A group without variance is found by TRL after rounding: (x - mean) / 1e-4 may be 1e-12 instead
  of 0; ours is exactly 0.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import make_config
from padded import assert_same, differs, ours, padded_batch
from trl_pieces import import_trl, lifted, theirs

from async_grpo.algorithms.grpo import group_advantages

SEEDS = range(8)


@pytest.fixture(scope="module")
def trl():
    return import_trl()


AGGREGATIONS = {
    "grpo": {"aggregation": "sample-mean"},
    "bnpo": {"aggregation": "token-mean"},
    "dapo": {"aggregation": "token-mean"},
    "dr_grpo": {"aggregation": "constant", "constant_length_samples": 9},
}


@pytest.mark.parametrize("mode", ["on_policy", "behaviour", "decoupled"])
@pytest.mark.parametrize("loss_type", AGGREGATIONS)
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_clipped_loss_with_k3_is_trl_s_in_every_aggregation(trl, loss_type, mode, beta, seed):
    batch = padded_batch(seed)
    config = make_config(
        ratio_mode=mode, clip_high=0.3, kl_coefficient=beta, **AGGREGATIONS[loss_type]
    )
    old = {"on_policy": None, "behaviour": batch.behaviour, "decoupled": batch.old}[mode]
    given = batch.old if mode == "decoupled" else None
    expected = theirs(trl, batch, old=old, loss_type=loss_type, beta=beta)
    assert_same(ours(batch, config, old=given), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_sequence_ratio_is_trl_s(trl, seed):
    batch = padded_batch(seed)
    config = make_config(ratio_mode="behaviour", ratio_level="sequence", clip_high=0.3)
    options = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    expected = theirs(trl, batch, old=batch.behaviour, **options)
    assert_same(ours(batch, config), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_is_trl_s_without_a_lower_bound(trl, seed):
    batch = padded_batch(seed, spread=1.0)
    expected = theirs(trl, batch, old=batch.behaviour, loss_type="cispo", epsilon_high=1.8)
    options = {"ratio_mode": "behaviour", "preset": "cispo", "clip_high": 0.8}
    assert_same(ours(batch, make_config(**options)), expected)
    assert differs(ours(batch, make_config(**options, clip_low=0.1)), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_delta_is_the_dual_clip_when_it_is_above_the_clip(trl, seed):
    batch = padded_batch(seed, spread=1.0)
    config = make_config(ratio_mode="behaviour", clip_high=0.3, dual_clip=1.6)
    expected = theirs(trl, batch, old=batch.behaviour, loss_type="grpo", delta=1.6)
    assert_same(ours(batch, config), expected)
    unbounded = make_config(ratio_mode="behaviour", clip_high=0.3)
    assert differs(ours(batch, unbounded), expected)


def test_delta_below_the_clip_also_cuts_positive_advantages(trl):
    batch = padded_batch(0)
    config = make_config(ratio_mode="behaviour", clip_high=1.0, dual_clip=1.1)
    expected = theirs(
        trl, batch, old=batch.behaviour, loss_type="grpo", epsilon_high=1.0, delta=1.1
    )
    ratio = torch.exp(batch.logprobs - batch.behaviour)
    between = (
        (ratio > 1.1) & (ratio < 2) & batch.is_trained.bool() & (batch.advantages > 0)[:, None]
    )
    assert between.any()
    assert (expected[1][between] == 0).all()
    assert (ours(batch, config)[1][between] < 0).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_importance_weighted_k3_is_trl_s_bias_correction(trl, loss_type, seed):
    batch = padded_batch(seed)
    options = {"clip_high": 0.3, "aggregation": "token-mean"}
    if loss_type == "cispo":
        options = {"preset": "cispo", "clip_high": 0.3}
    config = make_config(
        ratio_mode="behaviour", kl_coefficient=0.2, kl_estimator="k3_iw", **options
    )
    epsilon_high = 1.3 if loss_type == "cispo" else 0.3
    expected = theirs(
        trl, batch, old=batch.behaviour, loss_type=loss_type, epsilon_high=epsilon_high,
        beta=0.2, use_bias_correction_kl=True,
    )  # fmt: skip
    assert_same(ours(batch, config), expected)


def test_bias_correction_of_a_sequence_ratio_is_another_estimator(trl):
    batch = padded_batch(0)
    config = make_config(
        preset="gspo", ratio_mode="behaviour", kl_coefficient=0.2, kl_estimator="k3_iw"
    )
    options = {"loss_type": "grpo", "epsilon_low": 3e-4, "epsilon_high": 4e-4, "beta": 0.2}
    options |= {"importance_sampling_level": "sequence", "use_bias_correction_kl": True}
    assert differs(ours(batch, config), theirs(trl, batch, old=batch.behaviour, **options))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_entropy_bonus_is_trl_s_under_token_mean_only(trl, seed):
    batch = padded_batch(seed)
    options = {"ratio_mode": "behaviour", "clip_high": 0.3, "entropy_coefficient": 0.05}
    for loss_type, is_same in (("dapo", True), ("grpo", False)):
        config = make_config(**options, **AGGREGATIONS[loss_type])
        got = ours(batch, config)
        expected = theirs(trl, batch, old=batch.behaviour, loss_type=loss_type, entropy_coef=0.05)
        if is_same:
            assert_same(got, expected)
        else:
            assert (got[2] - expected[2]).abs().max() > 1e-4


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_engine_correction_is_trl_s(trl, loss_type, kind, level, seed):
    batch = padded_batch(seed, count=12)
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=f"{level}_{kind}",
        vllm_importance_sampling_clip_min=0.7 if kind == "mask" else None,
        vllm_importance_sampling_clip_max=1.1,
    )
    weights = lifted(
        trl.grpo.GRPOTrainer._generate_and_score_completions,
        assigns="vllm_importance_sampling_ratio",
        self=trainer,
        completion_mask=batch.is_output,
        tool_mask=batch.is_own,
        old_per_token_logps=batch.old,
        sampling_per_token_logps=batch.behaviour,
    )["vllm_importance_sampling_ratio"]
    cut = weights == 0 if kind == "mask" else weights == 1.1
    assert cut.any()
    expected = theirs(
        trl, batch, old=batch.old, loss_type=loss_type, correction=weights, beta=0.1,
        epsilon_high=1.3 if loss_type == "cispo" else 0.3, vllm_importance_sampling_correction=True,
    )  # fmt: skip
    options = AGGREGATIONS.get(loss_type, {"preset": "cispo"})
    config = make_config(
        ratio_mode="decoupled", clip_high=0.3, importance_correction=kind, correction_level=level,
        correction_low=0.7, correction_high=1.1, kl_coefficient=0.1, **options,
    )  # fmt: skip
    assert_same(ours(batch, config, old=batch.old), expected)


def test_what_depends_on_micro_batches_in_trl(trl):
    """Two micro-batches accumulate: only `bnpo`, a mean over one's tokens, changes with them."""
    batch = padded_batch(1)
    for loss_type, options in AGGREGATIONS.items():
        config = make_config(ratio_mode="behaviour", clip_high=0.3, **options)
        parts = [
            theirs(trl, batch, old=batch.behaviour, rows=rows, loss_type=loss_type, accumulation=2)
            for rows in (slice(0, 3), slice(3, 6))
        ]
        summed = tuple(sum(part) for part in zip(*parts, strict=True))
        if loss_type == "bnpo":
            assert differs(ours(batch, config), summed)
        else:
            assert_same(ours(batch, config), summed)


REWARDS = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=8)


@settings(max_examples=100, deadline=None)
@given(rewards=REWARDS, method=st.sampled_from(["grpo", "dr", "rloo"]))
def test_advantages_are_trl_s(trl, rewards, method):
    values = torch.tensor(rewards, dtype=torch.float64)
    names = {"num_generations": len(rewards), "rewards": values, "math": math}
    if method == "rloo":
        names["grouped_rewards"] = values[None]
        names["grouped_sum"] = values.sum()[None, None]
        names["scorable_counts"] = len(rewards)
        function, assigns = trl.rloo.RLOOTrainer._generate_and_score_completions, "baselines"
    else:
        trainer = SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            scale_rewards="group" if method == "grpo" else "none",
            reward_weights=torch.ones(1, dtype=torch.float64),
        )
        names |= {"self": trainer, "device": "cpu", "rewards_per_func": values[:, None]}
        names["unscorable_mask"] = torch.zeros(len(rewards), dtype=torch.bool)
        function, assigns = trl.grpo.GRPOTrainer._generate_and_score_completions, "advantages"
    expected = lifted(function, assigns=assigns, **names)["advantages"].numpy()
    # TRL divides a rounding error by 1e-4 where ours is exactly zero.
    assert group_advantages(rewards, method=method) == pytest.approx(expected, abs=1e-10)
