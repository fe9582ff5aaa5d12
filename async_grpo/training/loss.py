"""The objectives, as plain sums over tokens; nothing here divides by a count of a minibatch.

    gradient = (1 / D) * d/dθ  Σ_i Σ_t  w_i * loss_it        (design, section 4)
    loss_it  = f(old / b) * policy_it + β * kl_it - c * entropy_it

Legend: N trained tokens of a minibatch, `lp` the policy's log-probability, `b` the engine's, `old`
the one that the policy ratio compares with, sg stop-gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from async_grpo.config.train import TrainConfig
from async_grpo.training.ratios import (
    MAX_EXPONENT,
    bounded,
    cispo_policy_loss,
    clipped_policy_loss,
    correction_weights,
    kl_penalty,
    policy_ratio,
)
from async_grpo.types import PackedMinibatch

MODES = ("on_policy", "behaviour", "decoupled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Which terms the GRPO loss has; `config/objective.py` says what each field means."""

    mode: str  # on_policy: old = sg(lp); behaviour: old = b; decoupled: old is given, or sg(lp)
    ratio_level: str = "token"
    policy_loss: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    importance_correction: str = "none"
    correction_level: str = "token"
    correction_low: float = 0.5
    correction_high: float = 2.0
    kl_coefficient: float = 0.0  # of the loss: 0 where the penalty is part of the reward
    kl_estimator: str = "k3"
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {self.mode!r}: see --ratio-mode")

    @classmethod
    def from_config(cls, config: TrainConfig) -> Objective:
        values = {field.name: getattr(config, field.name) for field in fields(cls)}
        if not config.kl_in_loss:
            values["kl_coefficient"] = 0.0
        return cls(**values)


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    """What one minibatch adds to the gradient and to the metrics of its step."""

    loss: Tensor  # [] differentiable, Σ w_i * loss_it
    sums: Mapping[str, Tensor]  # [] each, detached; ranks and minibatches add up
    maxima: Mapping[str, Tensor]  # [] each, detached; ranks and minibatches take the maximum


def grpo_loss(
    logprobs: Tensor,
    entropy: Tensor,
    packed: PackedMinibatch,
    *,
    objective: Objective,
    old_logprobs: Tensor | None = None,
) -> LossSums:
    """Policy gradient with its penalties (DeepSeekMath, arXiv 2402.03300, eq. 3 and 19).

    logprobs, entropy [N]; `old_logprobs` [N] is for the mode `decoupled` alone, where None says
    that the policy has not moved since the start of the batch. The population of every sum is the
    minibatch's N trained tokens; `policy_loss_sum`, `kl_sum` and `loss_sum` are weighted like the
    loss, the others are not.
    """
    old = _old(logprobs, packed, objective, old_logprobs)
    policy, clipped = _policy_loss(logprobs, old, packed, objective)
    policy, corrected = _corrected(policy, old, packed, objective)
    policy_sum = (packed.weights * policy).sum()
    loss, kl_sums = policy_sum, {}
    if objective.kl_coefficient:
        kl_sums["kl_sum"] = _kl_sum(logprobs, old, packed, objective)
        loss = loss + objective.kl_coefficient * kl_sums["kl_sum"]
    if objective.entropy_coefficient:
        loss = loss - objective.entropy_coefficient * (packed.weights * entropy).sum()
    mismatch_sums, maxima = _mismatch(logprobs, packed.behaviour_logprobs)
    sums = {
        "loss_sum": loss,
        "policy_loss_sum": policy_sum,
        **kl_sums,
        "clipped_tokens": clipped.sum(),
        "corrected_tokens": corrected.sum(),
        "far_tokens": _is_far(logprobs, old, packed, objective).sum(),
        **mismatch_sums,
        **_token_counts(entropy, packed),
    }
    return LossSums(loss, sums=_detached(sums), maxima=maxima)


def sft_loss(logprobs: Tensor, entropy: Tensor, packed: PackedMinibatch) -> LossSums:
    """Cross-entropy of the given tokens: Σ w_i * -lp, with logprobs and entropy [N]."""
    loss = -(packed.weights * logprobs).sum()
    sums = {"loss_sum": loss, **_token_counts(entropy, packed)}
    return LossSums(loss, sums=_detached(sums), maxima={})


def _old(
    logprobs: Tensor, packed: PackedMinibatch, objective: Objective, given: Tensor | None
) -> Tensor:
    """What the ratio compares with, [N], without gradient."""
    if objective.mode == "behaviour":
        return packed.behaviour_logprobs
    if objective.mode == "decoupled" and given is not None:
        return given.detach()
    return logprobs.detach()


def _policy_loss(
    logprobs: Tensor, old: Tensor, packed: PackedMinibatch, objective: Objective
) -> tuple[Tensor, Tensor]:
    ratio = policy_ratio(logprobs, old, packed, level=objective.ratio_level)
    clip_low, clip_high = objective.clip_low, objective.clip_high
    if objective.policy_loss == "cispo":
        return cispo_policy_loss(
            ratio, logprobs, packed.advantages, clip_low=clip_low, clip_high=clip_high
        )
    return clipped_policy_loss(
        ratio,
        packed.advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=objective.dual_clip,
    )


def _corrected(
    policy: Tensor, old: Tensor, packed: PackedMinibatch, objective: Objective
) -> tuple[Tensor, Tensor]:
    """The policy's loss weighted by f(exp(old - b)), and where f cut the weight."""
    if objective.importance_correction == "none":
        return policy, torch.zeros_like(policy, dtype=torch.bool)
    weights, cut = correction_weights(
        old,
        packed.behaviour_logprobs,
        packed,
        kind=objective.importance_correction,
        level=objective.correction_level,
        low=objective.correction_low,
        high=objective.correction_high,
    )
    return weights * policy, cut


def _kl_sum(logprobs: Tensor, old: Tensor, packed: PackedMinibatch, objective: Objective) -> Tensor:
    """Σ w_i * kl_it.

    `k3_iw` is k3 times the token's policy ratio with its gradient, whose expectation under the old
    policy is the gradient of the KL itself (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    """
    if packed.reference_logprobs is None:
        raise ValueError(
            f"a KL coefficient of {objective.kl_coefficient} needs reference log-probabilities, "
            "got none: start a logprob worker"
        )
    is_weighted = objective.kl_estimator == "k3_iw"
    estimator = "k3" if is_weighted else objective.kl_estimator
    kl = kl_penalty(logprobs, packed.reference_logprobs, estimator=estimator)
    if is_weighted:
        kl = kl * torch.exp(bounded(logprobs - old))
    return (packed.weights * kl).sum()


@torch.no_grad()
def _is_far(logprobs: Tensor, old: Tensor, packed: PackedMinibatch, objective: Objective) -> Tensor:
    """[N] bool: which tokens are beyond the bound of exponents."""
    is_far = logprobs - old > MAX_EXPONENT
    if objective.kl_coefficient and packed.reference_logprobs is not None:
        is_far |= packed.reference_logprobs - logprobs > MAX_EXPONENT
    return is_far


@torch.no_grad()
def _mismatch(logprobs: Tensor, behaviour: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """How far trainer and engine differ on what was sampled: (sums, maxima), [] each.

    Of the ratio exp(lp - b): Σ of the k3 estimate of KL(behaviour || policy), Σ and Σ of squares,
    which make the effective sample size; the largest ratio, and the largest |lp - b|.
    """
    difference = logprobs - behaviour
    ratio = torch.exp(difference)
    sums = {
        "mismatch_kl_sum": (torch.expm1(difference) - difference).sum(),
        "mismatch_ratio_sum": ratio.sum(),
        "mismatch_ratio_square_sum": ratio.square().sum(),
    }
    none = difference.new_zeros(1)
    maxima = {
        "mismatch_max": torch.cat([difference.abs(), none]).max(),
        "mismatch_ratio_max": torch.cat([ratio, none]).max(),
    }
    return sums, maxima


def _token_counts(entropy: Tensor, packed: PackedMinibatch) -> dict[str, Tensor]:
    """The sums that every objective reports."""
    return {
        "entropy_sum": entropy.sum(),
        "trained_tokens": entropy.new_full((), entropy.numel(), dtype=torch.float64),
        "trained_samples": entropy.new_full((), packed.num_samples, dtype=torch.float64),
    }


def _detached(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in values.items()}
