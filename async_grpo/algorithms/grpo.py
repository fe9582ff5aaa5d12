"""The GRPO family: one class over the options of `config/objective.py`.

generated, verified ─▶ [reference, k1 only] ─▶ shaped rewards, advantages ─▶ drawn again?
                                                 └─▶ masked ─▶ [reference, KL in the loss]
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from async_grpo.algorithms.advantages import group_advantages, has_variance
from async_grpo.algorithms.base import (
    REFERENCE,
    Algorithm,
    LossSums,
    Samples,
    ScoreNeed,
    with_advantages,
)
from async_grpo.algorithms.grpo_words import objective_in_words
from async_grpo.algorithms.shaping import shaped
from async_grpo.config.objective import check_objective
from async_grpo.config.train import TrainConfig
from async_grpo.types import Group, Sample
from async_grpo.util.errors import ConfigError

if TYPE_CHECKING:
    from async_grpo.model.logprobs import TokenLogprobs
    from async_grpo.types import PackedMinibatch


class Grpo(Algorithm):
    """Advantages of a group, a clipped policy gradient and its penalties."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        check_objective(config)
        kl_in_reward = config.kl_coefficient > 0 and not config.kl_in_loss
        if config.kl_coefficient:
            self.needs = (ScoreNeed(REFERENCE, before_advantages=kl_in_reward),)
        # With one step a batch the policy itself is what it was at the start.
        self.uses_old_policy = config.mode == "decoupled" and config.steps_per_batch > 1
        is_corrected = config.importance_correction != "none"
        self._needs_one_row = config.ratio_level == "sequence" or (
            is_corrected and config.correction_level == "sequence"
        )
        self._every_term_has_advantage = not config.kl_in_loss and not config.entropy_coefficient

    def finish_group(self, group: Group) -> Group:
        """Penalties and advantages; replaced where nothing can be learnt and more may be drawn.

        That is a group without variance of its shaped rewards, by exact equality. The last one
        that a slot may draw is kept, whatever it is.
        """
        if self._needs_one_row and any(len(s.episode.rows) > 1 for s in group.samples):
            raise ConfigError(
                "ratios and corrections of sequences need episodes of one row, got one whose "
                "history was rewritten: take --ratio-level token and --correction-level token"
            )
        samples = tuple(shaped(sample, self.config) for sample in group.samples)
        rewards = [sample.shaped_reward for sample in samples]
        advantages = group_advantages(rewards, method=self.config.advantage)
        may_draw = group.attempt < self.config.dynamic_sampling
        group = with_advantages(replace(group, samples=samples), advantages.tolist())
        return replace(group, is_replaced=may_draw and not has_variance(rewards))

    def mask(self, samples: Samples) -> Samples:
        """Outputs that were cut are not trained, if the run says so; their advantages stay."""
        if not self.config.mask_truncated_samples:
            return samples
        return tuple(
            replace(sample, episode=sample.episode.untrained())
            if sample.episode.finish_reason == "length"
            else sample
            for sample in samples
        )

    def contributes(self, sample: Sample) -> bool:
        """A term that is not proportional to the advantage (KL in the loss, entropy) needs it."""
        if sample.num_trained_tokens == 0:
            return False
        return not self._every_term_has_advantage or sample.has_advantage

    def loss(self, scored: TokenLogprobs, packed: PackedMinibatch) -> LossSums:
        """See grpo_loss.py."""
        from async_grpo.algorithms.grpo_loss import grpo_loss  # with torch

        return grpo_loss(scored.logprobs, scored.entropy, packed, config=self.config)

    def in_words(self) -> tuple[str, ...]:
        return objective_in_words(self.config)
