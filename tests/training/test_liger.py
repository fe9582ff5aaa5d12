"""Losses and gradients equal those of Liger 0.8.5, where both define the same thing.

`LigerFusedLinearGRPOFunction.ppo_loss_fn` from log-probabilities on, in float64 to 1e-12; and the
fused loss, head and chunks included, against `model/logprobs.py` with `training/loss.py` in
float32 (it computes in nothing else), to 1e-5 of the norm.

Not the same: what `test_trl.py` says of `delta` and of `cispo`'s bound, for Liger follows TRL; a
sequence ratio weights its corrected KL; there is no entropy bonus, no k2, no lower bound of
`cispo`; the mask of a correction is made by the caller. Fully masked samples count in its D as in
ours.

Broken on purpose, each of these fails test_the_loss_is_liger_s: upper clip at 1 + clip_low, maximum
for minimum, dual clip dropped or for every advantage, CISPO's weight with gradient, the sequence
ratio a sum or over the minibatch, k3 with lp and ref exchanged, k3_iw's ratio detached, the loss
divided by its minibatch's samples, L_i counts masked tokens. A correction dropped, turned round, a
mean or truncated below fails test_a_truncated_correction_is_liger_s.
"""

import pytest
import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction
from oracle import make_config
from padded import assert_same, leaves, ours, pack, padded_batch, with_gradients

from async_grpo.model.logprobs import token_logprobs
from async_grpo.training.loss import Objective, grpo_loss

SEEDS = range(8)
VOCABULARY, WIDTH = 40, 16
SHARED = {"ratio_mode": "behaviour", "clip_high": 0.3}

# Options of Liger and of ours that mean the same.
SAME = {
    "grpo": ({"loss_type": "grpo"}, {}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"ratio_level": "sequence"},
    ),
    "dapo": ({"loss_type": "dapo"}, {"aggregation": "token-mean"}),
    "bnpo": ({"loss_type": "bnpo"}, {"aggregation": "token-mean"}),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "max_completion_length": 9},
        {"aggregation": "constant", "constant_length_samples": 9},
    ),
    "dual clip": ({"loss_type": "grpo", "delta": 1.5}, {"dual_clip": 1.5}),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"policy_loss": "cispo", "clip_low": 1.0, "aggregation": "token-mean"},
    ),
    "k3": ({"loss_type": "grpo", "beta": 0.2}, {"kl_coefficient": 0.2}),
    "weighted k3": (
        {"loss_type": "grpo", "beta": 0.2, "use_bias_correction_kl": True},
        {"kl_coefficient": 0.2, "kl_estimator": "k3_iw"},
    ),
}
DEFAULTS = {"epsilon_low": 0.2, "epsilon_high": 0.3, "beta": 0.0}


@pytest.mark.parametrize("case", SAME)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_loss_is_liger_s(case, seed):
    theirs, options = SAME[case]
    batch = padded_batch(seed)
    logprobs, entropies = leaves(batch)
    loss, _ = LigerFusedLinearGRPOFunction.ppo_loss_fn(
        logprobs,
        batch.is_trained.double(),
        batch.advantages,
        batch.is_trained.double(),
        ref_per_token_logps=batch.reference,
        old_per_token_logps=batch.behaviour,
        **DEFAULTS | theirs,
    )
    expected = with_gradients(loss, logprobs, entropies)
    assert_same(ours(batch, make_config(**SHARED | options)), expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_truncated_correction_is_liger_s(level, seed):
    batch = padded_batch(seed)
    difference = (batch.old - batch.behaviour) * batch.is_trained
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True)
    logprobs, entropies = leaves(batch)
    loss, _ = LigerFusedLinearGRPOFunction.ppo_loss_fn(
        logprobs,
        batch.is_trained.double(),
        batch.advantages,
        batch.is_trained.double(),
        ref_per_token_logps=batch.reference,
        old_per_token_logps=batch.old,
        vllm_is_ratio=difference.exp().clamp(max=1.2),
        **DEFAULTS | {"loss_type": "grpo", "beta": 0.2},
    )
    config = make_config(
        ratio_mode="decoupled", clip_high=0.3, kl_coefficient=0.2,
        importance_correction="truncate", correction_level=level, correction_high=1.2,
    )  # fmt: skip
    assert_same(ours(batch, config, old=batch.old), with_gradients(loss, logprobs, entropies))


@pytest.mark.parametrize("case", SAME)
def test_the_fused_loss_from_hidden_states_is_liger_s(case):
    theirs, options = SAME[case]
    torch.manual_seed(3)
    batch = padded_batch(3)
    rows, longest = batch.logprobs.shape
    hidden = torch.randn(rows, longest, WIDTH)
    weight = torch.randn(VOCABULARY, WIDTH) * 0.3
    ids = torch.randint(VOCABULARY, (rows, longest))
    own = (hidden @ weight.T / 0.7).log_softmax(-1).gather(-1, ids[..., None])[..., 0].double()
    batch = batch.moved_to(own)

    inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    liger = LigerFusedLinearGRPOLoss(compiled=False, temperature=0.7, **DEFAULTS | theirs)
    loss, _ = liger(
        inputs[0],
        inputs[1],
        ids,
        batch.is_trained.float(),
        batch.advantages.float(),
        ref_per_token_logps=batch.reference.float(),
        old_per_token_logps=batch.behaviour.float(),
    )
    expected = torch.autograd.grad(loss, inputs)

    config = make_config(**SHARED | options)
    inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    trained = batch.is_trained.bool()
    scored = token_logprobs(
        inputs[0][trained], inputs[1], ids[trained], temperature=0.7, chunk_size=5
    )
    packed = pack(batch, config, dtype=torch.float32)
    result = grpo_loss(*scored, packed, objective=Objective.from_config(config))
    divisor = batch.num_tokens if config.aggregation == "token-mean" else rows
    got = torch.autograd.grad(result.loss / divisor, inputs)
    for one, other in zip(got, expected, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()
