"""The loss of `Distillation`, as plain sums over tokens: nothing divides by a count of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from async_grpo.algorithms.base import LossSums
from async_grpo.algorithms.grpo_loss import grpo_loss
from async_grpo.algorithms.head_terms import NAME
from async_grpo.config.train import TrainConfig
from async_grpo.model.logprobs import TokenLogprobs
from async_grpo.types import PackedMinibatch
from async_grpo.types.roles import TEACHER


def distillation_loss(
    scored: TokenLogprobs, packed: PackedMinibatch, *, config: TrainConfig
) -> LossSums:
    """GRPO's sums with the teachers' part of each advantage, and γ Σ w_i divergence_it.

    `scored.terms[NAME]` [N] is there where γ is not 0, and is summed over given tokens too.
    `teacher_gap_sum` is over sampled tokens, unweighted, as `gkd_divergence_sum` is over all.
    """
    gap = packed.scores[TEACHER] - scored.logprobs.detach()
    followed = packed.advantages * config.reward_coefficient
    if config.opd_coefficient:
        bound = config.opd_clip or None
        within = gap if bound is None else gap.clamp(-bound, bound)
        followed = followed + config.opd_coefficient * within
    result = grpo_loss(
        scored.logprobs, scored.entropy, replace(packed, advantages=followed), config=config
    )
    loss, sums = result.loss, {**result.sums, "teacher_gap_sum": _sampled(gap, packed).sum()}
    if config.gkd_coefficient:
        divergence = scored.terms[NAME]
        sums |= {"gkd_divergence_sum": divergence.sum()}
        if config.gkd_square_temperature:
            divergence = divergence * config.gkd_temperature**2
        loss = loss + config.gkd_coefficient * (packed.weights * divergence).sum()
        if (tail := packed.scores.get(f"{TEACHER}.tail")) is not None:
            sums |= {"teacher_tail_sum": torch.exp(tail).sum()}
    return LossSums(loss, sums=sums)


def _sampled(values: Tensor, packed: PackedMinibatch) -> Tensor:
    """Those of tokens that the policy sampled."""
    return values if packed.is_given is None else values[~packed.is_given]
