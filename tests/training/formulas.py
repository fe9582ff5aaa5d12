"""The objectives of the GRPO family, token by token in float64, as their papers print them.

Independent of the package: plain floats, scalars of torch for their gradient, cases instead of
min and max, loops instead of masks. GRPO: DeepSeekMath (2402.03300), dual clip: Ye et al.
(1912.09729), GSPO: 2507.18071, CISPO: MiniMax-M1 (2506.13585), importance-weighted k3:
DeepSeek-V3.2 (2512.02556), overlong shaping: DAPO (2503.14476, eq. 13), Dr. GRPO: 2503.20783,
k1, k2 and k3: Schulman's note on estimators of the divergence.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from async_grpo.config.train_config import TrainConfig


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """The unmasked tokens of one sample, in order: L of each."""

    advantage: float
    logprobs: Sequence[Tensor]  # float64 scalars that carry gradient
    entropies: Sequence[Tensor]  # of the whole distribution at each token, in nats
    behaviour: Sequence[float]
    reference: Sequence[float] | None = None
    start: Sequence[float] | None = None  # policy at the start of the batch; None: as it is now


def objective(outputs: Sequence[Output], config: TrainConfig) -> Tensor:
    """(1 / D) Σ_i Σ_t w_i loss_it: the number that the gradient step goes down on."""
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        total = total + sample_loss(output, config)
    return total / divisor(outputs, config)


def divisor(outputs: Sequence[Output], config: TrainConfig) -> int:
    """D: samples, or their unmasked tokens."""
    if config.objective.aggregation == "token-mean":
        return sum(len(output.logprobs) for output in outputs)
    return len(outputs)


def sample_loss(output: Output, config: TrainConfig) -> Tensor:
    """Σ_t w_i (W_it policy_it + β kl_it - c entropy_it)."""
    old = old_logprobs(output, config.mode)
    ratios = policy_ratios(output, old, config.objective.ratio_level)
    corrections = engine_corrections(output, old, config)
    total = torch.zeros((), dtype=torch.float64)
    for t, logprob in enumerate(output.logprobs):
        loss = corrections[t] * policy_term(ratios[t], logprob, output.advantage, config)
        if config.objective.kl_in_loss:
            penalty = kl_term(logprob, output.reference[t], old[t], config.objective.kl_estimator)
            loss = loss + config.objective.kl_coefficient * penalty
        loss = loss - config.objective.entropy_coefficient * output.entropies[t]
        total = total + token_weight(len(output.logprobs), config) * loss
    return total


def token_weight(length: int, config: TrainConfig) -> float:
    """w_i of a sample with `length` unmasked tokens."""
    if config.objective.aggregation == "sample-mean":
        return 1 / length
    return (
        1.0
        if config.objective.aggregation == "token-mean"
        else 1 / config.objective.constant_length_samples
    )


def old_logprobs(output: Output, mode: str) -> list[float]:
    """The constants in the ratio's denominator."""
    if mode == "behaviour":
        return list(output.behaviour)
    if mode == "decoupled" and output.start is not None:
        return list(output.start)
    return [logprob.item() for logprob in output.logprobs]


def policy_ratios(output: Output, old: Sequence[float], level: str) -> list[Tensor]:
    """π/π_old of every token, or the geometric mean over the sample for each of its tokens."""
    logs = [logprob - then for logprob, then in zip(output.logprobs, old, strict=True)]
    if level == "sequence" and logs:
        logs = [sum(logs) / len(logs)] * len(logs)
    return [torch.exp(log) for log in logs]


def policy_term(ratio: Tensor, logprob: Tensor, advantage: float, config: TrainConfig) -> Tensor:
    """-A times the ratio while that improves nothing beyond the clip, or CISPO's weighted -A lp."""
    low, high = 1 - config.objective.clip_low, 1 + config.objective.clip_high
    value = ratio.item()
    if config.objective.policy_loss == "cispo":
        weight = low if value < low else high if value > high else value
        return -weight * advantage * logprob
    if advantage >= 0:
        return -advantage * (ratio if value <= high else 0 * ratio + high)
    if value < low:
        return -advantage * (0 * ratio + low)
    if config.objective.dual_clip and value > config.objective.dual_clip:
        return -advantage * (0 * ratio + config.objective.dual_clip)
    return -advantage * ratio


def engine_corrections(output: Output, old: Sequence[float], config: TrainConfig) -> list[float]:
    """The constants W: trainer over engine, truncated above, or 0 outside inclusive bounds."""
    logs = [then - said for then, said in zip(old, output.behaviour, strict=True)]
    if config.objective.correction_level == "sequence":
        logs = [math.fsum(logs)] * len(logs)
    return [_corrected(math.exp(log), config) for log in logs]


def _corrected(ratio: float, config: TrainConfig) -> float:
    if config.objective.importance_correction == "none":
        return 1.0
    if config.objective.importance_correction == "truncate":
        return min(ratio, config.objective.correction_high)
    return (
        ratio
        if config.objective.correction_low <= ratio <= config.objective.correction_high
        else 0.0
    )


def kl_term(logprob: Tensor, reference: float, old: float, estimator: str) -> Tensor:
    """What estimates KL(policy || reference) from one token."""
    log_ratio = reference - logprob
    if estimator == "k2":
        return log_ratio**2 / 2
    k3 = torch.exp(log_ratio) - log_ratio - 1
    return k3 if estimator == "k3" else torch.exp(logprob - old) * k3


def distance_to_a_cut(outputs: Sequence[Output], config: TrainConfig) -> float:
    """How near any ratio is to a bound where the gradient jumps; truncation and CISPO have none."""
    nearest = math.inf
    for output in outputs:
        old = old_logprobs(output, config.mode)
        if config.objective.policy_loss == "clip":
            bounds = (
                1 - config.objective.clip_low,
                1 + config.objective.clip_high,
                config.objective.dual_clip,
            )
            for ratio in policy_ratios(output, old, config.objective.ratio_level):
                nearest = min(nearest, *(abs(ratio.item() - bound) for bound in bounds))
        if config.objective.importance_correction == "mask":
            logs = [then - said for then, said in zip(old, output.behaviour, strict=True)]
            logs = [math.fsum(logs)] if config.objective.correction_level == "sequence" else logs
            for bound in (config.objective.correction_low, config.objective.correction_high):
                nearest = min([nearest, *(abs(math.exp(log) - bound) for log in logs)])
    return nearest


def cancellation(loss: Tensor, outputs: Sequence[Output], config: TrainConfig) -> float:
    """Σ|d loss / d lp| by the size of the terms that it is made of; near 0, they cancel.

    For example k3's derivative, 1 - exp(ref - lp), where policy and reference hardly differ: a
    rounded lp changes all of it.
    """
    tokens = [logprob for output in outputs for logprob in output.logprobs]
    slopes = torch.autograd.grad(loss, tokens, retain_graph=True, allow_unused=True)
    penalty = config.objective.kl_coefficient if config.objective.kl_in_loss else 0.0
    size = 0.0
    for output in outputs:
        length = len(output.logprobs)
        if length:
            size += length * token_weight(length, config) * (abs(output.advantage) + penalty)
    slope = sum(abs(value.item()) for value in slopes if value is not None)
    return slope * divisor(outputs, config) / size if size else 0.0


def shaped_reward(
    reward: float,
    config: TrainConfig,
    *,
    length: int,
    behaviour: Sequence[float],
    reference: Sequence[float],
) -> float:
    """What advantages are made of: less DAPO's punishment of `length`, less k1 of own tokens."""
    free = config.sampling.max_generation_tokens - config.objective.overlong_buffer_tokens
    if length > free:
        reward -= (
            config.objective.overlong_penalty
            * (length - free)
            / config.objective.overlong_buffer_tokens
        )
    if config.objective.kl_estimator == "k1":
        pairs = zip(behaviour, reference, strict=True)
        reward -= config.objective.kl_coefficient * math.fsum(said - ref for said, ref in pairs)
    return reward


def group_advantages(rewards: Sequence[float], method: str, *, eps: float = 1e-4) -> list[float]:
    """Each reward against its group: standardised, centred, or against the others' mean."""
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    if method == "rloo":
        total = math.fsum(rewards)
        return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]
    mean = statistics.fmean(rewards)
    scale = statistics.stdev(rewards) + eps if method == "grpo" else 1.0
    return [(reward - mean) / scale for reward in rewards]
