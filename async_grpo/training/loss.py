"""The objectives, as plain sums over tokens; nothing here divides by a count of a minibatch.

    gradient = (1 / D) * d/dθ  Σ_i Σ_t  w_i * loss_it        (design, section 4)

Legend: N trained tokens of a minibatch, `lp` the policy's log-probability, `b` the engine's,
`ref` the reference's, A the advantage, sg stop-gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from async_grpo.config.train import TrainConfig
from async_grpo.types import PackedMinibatch


@dataclass(frozen=True, slots=True)
class Objective:
    """Which terms the GRPO loss has."""

    denominator: str  # on_policy: sg(lp); behaviour: b
    clip_low: float
    clip_high: float
    kl_coefficient: float
    kl_estimator: str  # k2 or k3

    @classmethod
    def from_config(cls, config: TrainConfig) -> Objective:
        return cls(
            denominator=config.denominator,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_coefficient=config.kl_coefficient,
            kl_estimator=config.kl_estimator,
        )


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    """What one minibatch adds to the gradient and to the metrics of its step."""

    loss: Tensor  # [] differentiable, Σ w_i * loss_it
    sums: Mapping[str, Tensor]  # [] each, detached; ranks and minibatches add up
    maxima: Mapping[str, Tensor]  # [] each, detached; ranks and minibatches take the maximum


def grpo_loss(
    logprobs: Tensor, entropy: Tensor, packed: PackedMinibatch, *, objective: Objective
) -> LossSums:
    """Clipped policy gradient with a KL penalty (DeepSeekMath, arXiv 2402.03300, eq. 3 and 19).

    logprobs, entropy [N]. The population of every sum is the minibatch's N trained tokens;
    `policy_loss_sum`, `kl_sum` and `loss_sum` are weighted like the loss, the others are not.
    """
    on_policy = objective.denominator == "on_policy"
    old = logprobs.detach() if on_policy else packed.behaviour_logprobs
    ratio = torch.exp(logprobs - old)
    policy, clipped = clipped_policy_loss(
        ratio, packed.advantages, clip_low=objective.clip_low, clip_high=objective.clip_high
    )
    policy_sum = (packed.weights * policy).sum()
    kl_sum = _kl_sum(logprobs, packed, objective)
    loss = policy_sum + objective.kl_coefficient * kl_sum
    mismatch_kl_sum, mismatch_max = _mismatch(logprobs, packed.behaviour_logprobs)
    sums = {
        "loss_sum": loss,
        "policy_loss_sum": policy_sum,
        "kl_sum": kl_sum,
        "clipped_tokens": clipped.sum(),
        "mismatch_kl_sum": mismatch_kl_sum,
        **_token_counts(entropy, packed),
    }
    return LossSums(loss, sums=_detached(sums), maxima={"mismatch_max": mismatch_max})


def sft_loss(logprobs: Tensor, entropy: Tensor, packed: PackedMinibatch) -> LossSums:
    """Cross-entropy of the given tokens: Σ w_i * -lp, with logprobs and entropy [N]."""
    loss = -(packed.weights * logprobs).sum()
    sums = {"loss_sum": loss, **_token_counts(entropy, packed)}
    return LossSums(loss, sums=_detached(sums), maxima={})


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), and where the clip cut the gradient.

    A good token's ratio counts up to 1 + high, a bad token's down to 1 - low; going back is free:

    >>> ratio = torch.tensor([1.5, 1.5, 0.5, 0.5])
    >>> advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    >>> loss, clipped = clipped_policy_loss(ratio, advantages, clip_low=0.25, clip_high=0.25)
    >>> loss.tolist()
    [-1.25, 1.5, -0.5, 0.75]
    >>> clipped.tolist()
    [True, False, False, True]
    """
    free = ratio * advantages
    limited = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(free, limited), limited < free


def kl_penalty(logprobs: Tensor, reference: Tensor, *, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference), [N] (Schulman, "Approximating KL divergence").

    >>> lp, ref = torch.tensor([0.0, -2.0]), torch.tensor([0.0, -1.0])
    >>> kl_penalty(lp, ref, estimator="k2").tolist()
    [0.0, 0.5]
    >>> [round(value, 4) for value in kl_penalty(lp, ref, estimator="k3").tolist()]  # e - 1 - 1
    [0.0, 0.7183]
    """
    log_ratio = reference - logprobs
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"kl_estimator must be k2 or k3, got {estimator!r}: see --kl-estimator")


def _kl_sum(logprobs: Tensor, packed: PackedMinibatch, objective: Objective) -> Tensor:
    """Σ w_i * kl_it, zero when the penalty is off."""
    if objective.kl_coefficient == 0:
        return torch.zeros_like(logprobs).sum()
    if packed.reference_logprobs is None:
        raise ValueError(
            f"a KL coefficient of {objective.kl_coefficient} needs reference log-probabilities, "
            "got none: start a logprob worker"
        )
    kl = kl_penalty(logprobs, packed.reference_logprobs, estimator=objective.kl_estimator)
    return (packed.weights * kl).sum()


@torch.no_grad()
def _mismatch(logprobs: Tensor, behaviour: Tensor) -> tuple[Tensor, Tensor]:
    """How far engine and trainer differ, [] each.

    First Σ of the k3 estimate of KL(behaviour || policy), then the largest |lp - b|.
    """
    difference = logprobs - behaviour
    kl = torch.expm1(difference) - difference
    return kl.sum(), torch.cat([difference.abs(), difference.new_zeros(1)]).max()


def _token_counts(entropy: Tensor, packed: PackedMinibatch) -> dict[str, Tensor]:
    """The sums that every objective reports."""
    return {
        "entropy_sum": entropy.sum(),
        "trained_tokens": entropy.new_tensor(entropy.numel()),
        "trained_samples": entropy.new_tensor(packed.num_samples),
    }


def _detached(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in values.items()}
