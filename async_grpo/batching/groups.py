"""What becomes of a finished group: its rewards, advantages and masks, or another question. Pure.

generated, verified ─▶ [reference, k1 only] ─▶ graded ─▶ drawn again?
                                                 └─▶ masked ─▶ [reference, KL in the loss]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from async_grpo.batching.advantage import group_advantages, has_variance
from async_grpo.batching.shaping import RewardShaping
from async_grpo.config.train import TrainConfig
from async_grpo.errors import ConfigError
from async_grpo.types import Sample

Samples = tuple[Sample, ...]


class GroupRules:
    """The options that decide for a group, and nothing else: every method is a function of them."""

    def __init__(self, config: TrainConfig) -> None:
        self._advantage = config.advantage
        is_corrected = config.importance_correction != "none"
        self._needs_one_row = config.ratio_level == "sequence" or (
            is_corrected and config.correction_level == "sequence"
        )
        self._masks_truncated = config.mask_truncated_samples
        self._num_replacements = config.dynamic_sampling
        self._kl_in_loss = config.kl_in_loss
        self._kl_in_reward = config.needs_reference and not config.kl_in_loss
        self._every_term_has_advantage = not config.kl_in_loss and not config.entropy_coefficient
        self._shaping = RewardShaping(
            max_tokens=config.max_generation_tokens,
            overlong_buffer_tokens=config.overlong_buffer_tokens,
            overlong_penalty=config.overlong_penalty,
            kl_coefficient=config.kl_coefficient if self._kl_in_reward else 0.0,
        )

    def to_score_before_advantages(self, samples: Samples) -> Samples:
        """Samples whose reward cannot be known without the reference: with k1, those with tokens.

        Outputs that will be masked for their length are among them: they serve the baseline.
        """
        return _with_trained_tokens(samples) if self._kl_in_reward else ()

    def to_score_for_loss(self, samples: Samples) -> Samples:
        """Samples that need the reference in the loss; those that are not trained need none."""
        return _with_trained_tokens(samples) if self._kl_in_loss else ()

    def graded(self, samples: Samples) -> Samples:
        """Penalties and advantages for one group, every member of which was verified."""
        if self._needs_one_row and any(len(sample.episode.rows) > 1 for sample in samples):
            raise ConfigError(
                "ratios and corrections of sequences need episodes of one row, got one whose "
                "history was rewritten: take --ratio-level token and --correction-level token"
            )
        shaped = [self._shaping.apply(sample) for sample in samples]
        rewards = [sample.shaped_reward for sample in shaped]
        advantages = group_advantages(rewards, method=self._advantage)
        return tuple(
            replace(sample, advantage=float(advantage))
            for sample, advantage in zip(shaped, advantages, strict=True)
        )

    def is_drawn_again(self, graded: Samples, *, attempt: int) -> bool:
        """Nothing can be learnt from these, and the slot may draw another question.

        Without variance by exact equality of the shaped rewards. The last group that a slot may
        draw is kept, whatever it is.
        """
        rewards = [sample.shaped_reward for sample in graded]
        return attempt < self._num_replacements and not has_variance(rewards)

    def masked(self, graded: Samples) -> Samples:
        """Outputs that were cut are not trained, if the run says so; their advantages stay."""
        if not self._masks_truncated:
            return graded
        return tuple(
            replace(sample, episode=sample.episode.untrained())
            if sample.episode.finish_reason == "length"
            else sample
            for sample in graded
        )

    def contributes(self, sample: Sample) -> bool:
        """False only where the gradient of the sample is exactly zero, whatever the policy.

        A term that is not proportional to the advantage (KL in the loss, entropy) needs the sample.
        """
        if sample.num_trained_tokens == 0:
            return False
        return sample.advantage != 0.0 or not self._every_term_has_advantage


def with_scores(samples: Samples, scored: Sequence[Sample]) -> Samples:
    """`samples`, those among `scored` with their reference log-probabilities."""
    by_index = {sample.index: sample for sample in scored}
    return tuple(by_index.get(sample.index, sample) for sample in samples)


def _with_trained_tokens(samples: Samples) -> Samples:
    return tuple(sample for sample in samples if sample.num_trained_tokens)
