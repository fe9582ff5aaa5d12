"""The loss of the GRPO family: plain sums over tokens, not divided by their number.

    gradient = (1 / D) * d/dθ  Σ_i Σ_t  w_i * loss_it        (design, section 4)
    loss_it  = f(old / b) * policy_it + β * kl_it - c * entropy_it

Legend: N trained tokens of a minibatch, S its samples, `lp` the policy's log-probability, `b` the
engine's, `old` the one that the policy ratio compares with, `ref` the reference's, sg
stop-gradient.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from async_grpo.algorithms.base import LossSums
from async_grpo.config.objective import ObjectiveOptions
from async_grpo.config.roles import REFERENCE
from async_grpo.types import PackedMinibatch

MAX_EXPONENT = 20.0  # nats


def grpo_loss(
    logprobs: Tensor,
    entropy: Tensor,
    packed: PackedMinibatch,
    *,
    objective: ObjectiveOptions,
    mode: str,
) -> LossSums:
    """Policy gradient with its penalties (DeepSeekMath, arXiv 2402.03300, eq. 3 and 19).

    logprobs, entropy [N]. `packed.scores["old"]` [N] is read in the mode `decoupled`; it is missing
    while the policy has not moved since the start of the batch. Every sum is over the minibatch's
    trained tokens that were sampled; given ones have no term here. `policy_loss_sum` and
    `kl_sum` are weighted like the loss, the others are not. `mode`: `TrainConfig.mode`.
    """
    if packed.is_given is not None:
        logprobs, entropy, packed = _of_sampled(logprobs, entropy, packed, ~packed.is_given)
    old = _old(logprobs, packed, mode)
    ratio = policy_ratio(logprobs, old, packed, level=objective.ratio_level)
    policy, clipped = policy_loss(ratio, logprobs, packed.advantages, objective)
    corrected = torch.zeros_like(clipped)
    if objective.importance_correction != "none":
        correction, corrected = correction_weights(old, packed, objective)
        policy = correction * policy
    policy_sum = (packed.weights * policy).sum()
    loss, kl_sums = policy_sum, {}
    is_far = logprobs.detach() - old > MAX_EXPONENT  # see `bounded`
    if objective.kl_in_loss:
        is_far |= packed.scores[REFERENCE] - logprobs.detach() > MAX_EXPONENT
        kl_sums["kl_sum"] = _kl_sum(logprobs, old, packed, objective.kl_estimator)
        loss = loss + objective.kl_coefficient * kl_sums["kl_sum"]
    if objective.entropy_coefficient:
        loss = loss - objective.entropy_coefficient * (packed.weights * entropy).sum()
    sums = {
        "policy_loss_sum": policy_sum,
        **kl_sums,
        "clipped_tokens": clipped.sum(),
        "corrected_tokens": corrected.sum(),
        "far_tokens": is_far.sum(),
    }
    return LossSums(loss, sums=sums)


def with_cross_entropy(
    found: LossSums, logprobs: Tensor, packed: PackedMinibatch, coefficient: float
) -> LossSums:
    """Add -coefficient * Σ w_i * lp over the given tokens: they were not sampled, so no ratio."""
    is_given = packed.is_given
    if is_given is None:
        is_given = torch.zeros_like(packed.weights, dtype=torch.bool)
    nll = -logprobs[is_given]
    loss = found.loss + coefficient * (packed.weights[is_given] * nll).sum()
    own = {"ref_answer_nll_sum": nll.detach().sum(), "ref_answer_tokens": is_given.sum()}
    return LossSums(loss, sums={**found.sums, **own})


def _of_sampled(
    logprobs: Tensor, entropy: Tensor, packed: PackedMinibatch, is_sampled: Tensor
) -> tuple[Tensor, Tensor, PackedMinibatch]:
    """The inputs of the loss for sampled tokens alone; weights stay those of whole samples."""
    chosen = replace(
        packed,
        sample_index=packed.sample_index[is_sampled],
        weights=packed.weights[is_sampled],
        advantages=packed.advantages[is_sampled],
        behaviour_logprobs=packed.behaviour_logprobs[is_sampled],
        # Teachers' payloads have columns; nothing here reads them, so they are not copied.
        scores={n: each[is_sampled] for n, each in packed.scores.items() if each.ndim == 1},
        is_given=None,
    )
    return logprobs[is_sampled], entropy[is_sampled], chosen


def _old(logprobs: Tensor, packed: PackedMinibatch, mode: str) -> Tensor:
    """The log-probabilities [N] under the old policy of the ratio, without gradient."""
    if mode == "behaviour":
        return packed.behaviour_logprobs
    given = packed.scores.get("old") if mode == "decoupled" else None
    return (logprobs if given is None else given).detach()


def _kl_sum(logprobs: Tensor, old: Tensor, packed: PackedMinibatch, estimator: str) -> Tensor:
    """Σ w_i * kl_it.

    `k3_iw` is k3 times the token's policy ratio with its gradient, whose expectation under the old
    policy is the gradient of the KL itself (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    """
    kl = kl_penalty(logprobs, packed.scores[REFERENCE], estimator=estimator)
    if estimator == "k3_iw":
        kl = kl * torch.exp(bounded(logprobs - old))
    return (packed.weights * kl).sum()


def bounded(log_ratio: Tensor) -> Tensor:
    """The log-ratio, at most `MAX_EXPONENT`: products of two such ratios are finite in float32.

    With an infinite ratio, a gradient that a clip has made 0 would be 0 * inf = NaN. A bounded
    value has no gradient. No lower bound is needed: exp() goes to 0.
    """
    return log_ratio.clamp(max=MAX_EXPONENT)


def over_samples(values: Tensor, packed: PackedMinibatch, *, mean: bool) -> Tensor:
    """For each token [N] the sum, or mean, of the values of its sample's trained tokens.

    All tokens of a sample are in the same minibatch, so that no partition changes the result.
    """
    num_rows = len(packed.cu_seqlens) - 1
    totals_S = values.new_zeros(num_rows).index_add(0, packed.sample_index, values)
    if mean:
        counts_S = torch.bincount(packed.sample_index, minlength=num_rows)
        totals_S = totals_S / counts_S.clamp(min=1)
    return totals_S[packed.sample_index]


def policy_ratio(logprobs: Tensor, old: Tensor, packed: PackedMinibatch, *, level: str) -> Tensor:
    """Probability under the policy divided by that under `old`, [N], with gradient.

    `sequence` is GSPO's length-normalised one, exp(mean_t (lp - old)), the same for all tokens of a
    sample (arXiv 2507.18071, eq. 7).
    """
    log_ratio = logprobs - old
    if level == "sequence":
        log_ratio = over_samples(log_ratio, packed, mean=True)
    return torch.exp(bounded(log_ratio))


def policy_loss(
    ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: ObjectiveOptions
) -> tuple[Tensor, Tensor]:
    """Each token's surrogate loss [N], and bool [N]: whether a bound cut its gradient or weight.

    `clip` is -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A): with A > 0 a ratio has a gradient
    below 1 + high, with A < 0 above 1 - low:

    >>> config = ObjectiveOptions(clip_low=0.25, clip_high=0.25)
    >>> ratio = torch.tensor([1.5, 1.5, 0.5, 0.5])
    >>> advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    >>> loss, clipped = policy_loss(ratio, ratio.log(), advantages, config)
    >>> loss.tolist()
    [-1.25, 1.5, -0.5, 0.75]
    >>> clipped.tolist()
    [True, False, False, True]

    `dual_clip` also bounds ratios with A < 0 above (arXiv 1912.09729, eq. 5); 0 is off. `cispo` is
    -sg(clip(ratio, 1 - low, 1 + high)) * A * lp (arXiv 2506.13585, eq. 4): every token keeps a
    gradient, of bounded weight.
    """
    limited = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    if config.policy_loss == "cispo":
        weight = limited.detach()
        return -weight * advantages * logprobs, weight != ratio.detach()
    free, limited = ratio * advantages, limited * advantages
    objective, clipped = torch.minimum(free, limited), limited < free
    if config.dual_clip:
        floor = torch.where(advantages < 0, config.dual_clip * advantages, -torch.inf)
        clipped = clipped | (objective < floor)
        objective = torch.maximum(objective, floor)
    return -objective, clipped


@torch.no_grad()
def correction_weights(
    old: Tensor, packed: PackedMinibatch, config: ObjectiveOptions
) -> tuple[Tensor, Tensor]:
    """Weights f(exp(old - b)) [N] that correct the engine's numerics, and bool [N]: where f cut.

    `truncate` is min(., high); `mask` keeps ratios in [low, high] and makes others 0. At level
    `sequence` the ratio is that of the whole output, exp(sum_t (old - b)).
    """
    low, high = config.correction_low, config.correction_high
    log_ratio = old - packed.behaviour_logprobs
    if config.correction_level == "sequence":
        log_ratio = over_samples(log_ratio, packed, mean=False)
    ratio = torch.exp(log_ratio)
    if config.importance_correction == "truncate":
        return ratio.clamp(max=high), ratio > high
    outside = (ratio < low) | (ratio > high)
    return ratio.masked_fill(outside, 0.0), outside


def kl_penalty(logprobs: Tensor, reference: Tensor, *, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference), [N] (Schulman, "Approximating KL divergence").

    `estimator`: k2; any other name is k3.

    >>> lp, ref = torch.tensor([0.0, -2.0]), torch.tensor([0.0, -1.0])
    >>> kl_penalty(lp, ref, estimator="k2").tolist()
    [0.0, 0.5]
    >>> [round(value, 4) for value in kl_penalty(lp, ref, estimator="k3").tolist()]  # e - 1 - 1
    [0.0, 0.7183]
    """
    log_ratio = reference - logprobs
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    log_ratio = bounded(log_ratio)
    return torch.expm1(log_ratio) - log_ratio


@torch.no_grad()
def mismatch(
    logprobs: Tensor, packed: PackedMinibatch
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """How far trainer and engine differ on sampled tokens: (sums, maxima), [] each.

    Sums: the k3 estimate of KL(behaviour || policy), the ratios exp(lp - b) and their squares, from
    which the effective sample size follows. Maxima: of the ratio, and of |lp - b|.
    """
    difference = logprobs - packed.behaviour_logprobs
    if packed.is_given is not None:
        difference = difference[~packed.is_given]
    ratio = torch.exp(difference)
    sums = {
        "sampled_tokens": difference.new_full((), difference.numel(), dtype=torch.float64),
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
