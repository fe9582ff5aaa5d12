"""The GRPO family's loss, as plain sums over tokens: nothing here divides by a count of them.

    gradient = (1 / D) * d/dθ  Σ_i Σ_t  w_i * loss_it        (design, section 4)
    loss_it  = f(old / b) * policy_it + β * kl_it - c * entropy_it

Legend: N trained tokens of a minibatch, `lp` the policy's log-probability, `b` the engine's, `old`
the one that the policy ratio compares with, sg stop-gradient.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from async_grpo.algorithms.base import LossSums
from async_grpo.algorithms.ratios import (
    MAX_EXPONENT,
    bounded,
    correction_weights,
    kl_penalty,
    policy_loss,
    policy_ratio,
)
from async_grpo.config.train import TrainConfig
from async_grpo.types import PackedMinibatch
from async_grpo.types.roles import REFERENCE


def grpo_loss(
    logprobs: Tensor,
    entropy: Tensor,
    packed: PackedMinibatch,
    *,
    config: TrainConfig,
) -> LossSums:
    """Policy gradient with its penalties (DeepSeekMath, arXiv 2402.03300, eq. 3 and 19).

    logprobs, entropy [N]; `packed.scores["old"]` [N] is for the mode `decoupled` alone, and is not
    there while the policy has not moved since the start of the batch. The population of every sum
    is the minibatch's trained tokens that were sampled: given ones have no term here.
    `policy_loss_sum` and `kl_sum` are weighted like the loss, the others are not.
    """
    if packed.is_given is not None:
        logprobs, entropy, packed = _of_sampled(logprobs, entropy, packed, ~packed.is_given)
    old = _old(logprobs, packed, config)
    ratio = policy_ratio(logprobs, old, packed, level=config.ratio_level)
    policy, clipped = policy_loss(ratio, logprobs, packed.advantages, config)
    corrected = torch.zeros_like(clipped)
    if config.importance_correction != "none":
        correction, corrected = correction_weights(old, packed, config)
        policy = correction * policy
    policy_sum = (packed.weights * policy).sum()
    loss, kl_sums = policy_sum, {}
    if config.kl_in_loss:
        kl_sums["kl_sum"] = _kl_sum(logprobs, old, packed, config)
        loss = loss + config.kl_coefficient * kl_sums["kl_sum"]
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * (packed.weights * entropy).sum()
    sums = {
        "policy_loss_sum": policy_sum,
        **kl_sums,
        "clipped_tokens": clipped.sum(),
        "corrected_tokens": corrected.sum(),
        "far_tokens": _is_far(logprobs, old, packed, config).sum(),
    }
    return LossSums(loss, sums=sums)


def _of_sampled(
    logprobs: Tensor, entropy: Tensor, packed: PackedMinibatch, is_sampled: Tensor
) -> tuple[Tensor, Tensor, PackedMinibatch]:
    """What the loss reads, of the sampled tokens alone; the weights stay those of whole samples."""
    chosen = replace(
        packed,
        sample_index=packed.sample_index[is_sampled],
        weights=packed.weights[is_sampled],
        advantages=packed.advantages[is_sampled],
        behaviour_logprobs=packed.behaviour_logprobs[is_sampled],
        # Payloads of teachers, which have columns, would cost a copy that nothing here reads.
        scores={n: each[is_sampled] for n, each in packed.scores.items() if each.ndim == 1},
        is_given=None,
    )
    return logprobs[is_sampled], entropy[is_sampled], chosen


def _old(logprobs: Tensor, packed: PackedMinibatch, config: TrainConfig) -> Tensor:
    """What the ratio compares with, [N], without gradient."""
    if config.mode == "behaviour":
        return packed.behaviour_logprobs
    given = packed.scores.get("old") if config.mode == "decoupled" else None
    return (logprobs if given is None else given).detach()


def _kl_sum(logprobs: Tensor, old: Tensor, packed: PackedMinibatch, config: TrainConfig) -> Tensor:
    """Σ w_i * kl_it.

    `k3_iw` is k3 times the token's policy ratio with its gradient, whose expectation under the old
    policy is the gradient of the KL itself (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    """
    kl = kl_penalty(logprobs, packed.scores[REFERENCE], estimator=config.kl_estimator)
    if config.kl_estimator == "k3_iw":
        kl = kl * torch.exp(bounded(logprobs - old))
    return (packed.weights * kl).sum()


@torch.no_grad()
def _is_far(logprobs: Tensor, old: Tensor, packed: PackedMinibatch, config: TrainConfig) -> Tensor:
    """[N] bool: which tokens are beyond the bound of exponents."""
    is_far = logprobs - old > MAX_EXPONENT
    if config.kl_in_loss:
        is_far |= packed.scores[REFERENCE] - logprobs > MAX_EXPONENT
    return is_far
