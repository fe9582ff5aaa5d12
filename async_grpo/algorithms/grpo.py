"""The GRPO family: one class over the options of `config/objective.py`. Pure.

generated, verified ─▶ [reference, k1 only] ─▶ shaped rewards, advantages ─▶ drawn again?
                                                 └─▶ masked ─▶ [reference, KL in the loss]

Rewards are shaped before the baseline is subtracted: by penalties for length and for KL from the
reference. A run prints once in words what it optimises.

Legend: _G members of a group, _L output tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from async_grpo.algorithms.base import Algorithm, LossSums, Samples, ScoreNeed, with_advantages
from async_grpo.config.objective import ObjectiveOptions, check_objective, preset_options, typed_out
from async_grpo.config.option import flag
from async_grpo.config.roles import REFERENCE
from async_grpo.config.sampling_options import SamplingOptions
from async_grpo.types import Group, Sample
from async_grpo.types.metrics import Metric
from async_grpo.util.errors import ConfigError

if TYPE_CHECKING:
    from async_grpo.model.logprobs import TokenLogprobs
    from async_grpo.types import PackedMinibatch

DENOMINATORS = {
    "sample-mean": "a mean over each sample's tokens, then over the samples of the step",
    "token-mean": "a mean over all tokens of the step",
    "constant": "each sample's token sum by {} tokens, then a mean over the samples of the step",
}
OLD_POLICY = {  # by `TrainConfig.mode`
    "on_policy": "the policy itself",
    "behaviour": "what the engine recorded",
    "decoupled": "the policy at the start of the batch",
}


REFERENCE_NLL = Metric(
    "ref_answer_nll", "ref_answer_nll_sum", "ref_answer_tokens", "nats", "Cross-entropy of answers",
    "less the log-probability of a token of a reference answer under the policy",
)  # fmt: skip

CUT = {  # by --length-limit-policy
    "zero_reward": "truncated outputs have a reward of 0",
    "invalidate": "truncated outputs are left out of their groups, which favours short ones",
}


class Grpo(Algorithm):
    """Advantages of a group, a clipped policy gradient and its penalties."""

    @property
    def takes_ref_answers(self) -> bool:  # type: ignore[override]  # a loss of yours must know them
        """Whether `loss` is this one."""
        return type(self).loss is Grpo.loss

    def prepare(self) -> None:
        """See `Algorithm`."""
        objective, mode = self.config.objective, self.config.mode
        longest = self.config.sampling.max_generation_tokens
        check_objective(objective, mode=mode, max_generation_tokens=longest)
        if objective.mask_truncated_samples and self.config.sampling.length_limit_policy in CUT:
            raise self.config.refusal(
                "mask_truncated_samples", "goes with --length-limit-policy truncate alone, which "
                "keeps what such outputs earned for the baseline", "drop one of the two",
            )  # fmt: skip
        if objective.kl_coefficient and not self.config.trainer_scores_reference:
            self.needs = (ScoreNeed(REFERENCE, before_advantages=not objective.kl_in_loss),)
        # With one step a batch the policy is still that of the batch's start.
        self.uses_old_policy = mode == "decoupled" and self.config.batching.steps_per_batch > 1
        # The ratio is then exactly 1, so that no bound can change anything.
        self.clip_is_inert = mode != "behaviour" and not self.uses_old_policy
        is_corrected = objective.importance_correction != "none"
        if objective.ref_answer_coefficient:
            self.metrics = (*self.metrics, REFERENCE_NLL)
        self._needs_one_row = objective.ratio_level == "sequence" or (
            is_corrected and objective.correction_level == "sequence"
        )

    def finish_group(self, group: Group) -> Group:
        """The group with penalties and advantages, or replaced.

        A group is replaced if its shaped rewards have no variance, by exact equality, and its slot
        may draw again.
        """
        if self._needs_one_row and any(len(s.episode.rows) > 1 for s in group.samples):
            raise ConfigError(
                "ratios and corrections of sequences need episodes of one row, got one whose "
                "history was rewritten: take --ratio-level token and --correction-level token"
            )
        objective, max_tokens = self.config.objective, self.config.sampling.max_generation_tokens
        samples = tuple(shaped(each, objective, max_tokens=max_tokens) for each in group.samples)
        rewards = [sample.shaped_reward for sample in samples]
        advantages = group_advantages(rewards, method=objective.advantage)
        may_draw = group.attempt < objective.dynamic_sampling
        group = with_advantages(replace(group, samples=samples), advantages.tolist())
        return replace(group, is_replaced=may_draw and not has_variance(rewards))

    def mask(self, samples: Samples) -> Samples:
        """Mask truncated outputs with --mask-truncated-samples; their advantages stay."""
        if not self.config.objective.mask_truncated_samples:
            return samples
        return tuple(
            replace(sample, episode=sample.episode.untrained())
            if sample.episode.finish_reason == "length"
            else sample
            for sample in samples
        )

    def contributes(self, sample: Sample) -> bool:
        """Without an advantage only KL in the loss and the entropy bonus have a gradient.

        A reference answer has that of its cross-entropy.
        """
        objective = self.config.objective
        if sample.episode.is_given:
            return super().contributes(sample)
        needs_advantage = not objective.kl_in_loss and not objective.entropy_coefficient
        return super().contributes(sample) and (sample.has_advantage or not needs_advantage)

    def loss(self, scored: TokenLogprobs, packed: PackedMinibatch) -> LossSums:
        """See grpo_loss.py."""
        from async_grpo.algorithms.grpo_loss import grpo_loss, with_cross_entropy  # with torch

        objective = self.config.objective
        found = grpo_loss(
            scored.logprobs, scored.entropy, packed, objective=objective, mode=self.config.mode
        )
        if not objective.ref_answer_coefficient:
            return found
        return with_cross_entropy(found, scored.logprobs, packed, objective.ref_answer_coefficient)

    def in_words(self) -> tuple[str, ...]:
        """Preset, denominator, ratio and clip, correction, penalties, sampling."""
        objective, sampling, mode = self.config.objective, self.config.sampling, self.config.mode
        inert = ", which is inert: the ratio is always 1" if self.clip_is_inert else ""
        denominator = DENOMINATORS[objective.aggregation].format(objective.constant_length_samples)
        sentences = (
            _preset(objective, sampling.max_generation_tokens),
            f"loss: {denominator}; advantage {objective.advantage}",
            f"ratio: a {objective.ratio_level}, against {OLD_POLICY[mode]}; "
            f"{_clip(objective)}{inert}",
            f"engine/trainer correction: {_correction(objective, mode, sampling.max_staleness)}",
            _penalties(objective),
            _rewards(objective, sampling),
        )
        return tuple(sentence for sentence in sentences if sentence)


def group_advantages(
    rewards_G: ArrayLike, *, method: str = "grpo", eps: float = 1e-4
) -> NDArray[np.float64]:
    """Advantages [G] of one group, of samples with and without a score.

    - `grpo`: (x - mean) / (std + eps), with the sample's std (ddof 1). DeepSeekMath leaves both
      open; TRL and verl take torch's default, so their learning rates carry over. ddof 1 is also
      the unbiased estimate for the few members of a group.
    - `dr`: x - mean (Dr. GRPO).
    - `rloo`: x - mean of the other members.

    Of a group without variance, by exact equality, all are exactly 0.0. Raises ValueError for
    rewards that are not finite.

    >>> group_advantages([1, 0, 0, 1], method="rloo").round(3).tolist()
    [0.667, -0.667, -0.667, 0.667]
    """
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    if not np.isfinite(rewards_G).all():
        raise ValueError(
            f"rewards must be finite, got {rewards_G.tolist()}: fix the reward adapter"
        )
    if not has_variance(rewards_G):
        return np.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    if method == "grpo":
        return centred_G / (rewards_G.std(ddof=1) + eps)
    if method == "rloo":  # x - (sum - x) / (n - 1) = (x - mean) * n / (n - 1)
        return centred_G * (len(rewards_G) / (len(rewards_G) - 1))
    return centred_G


def has_variance(rewards_G: ArrayLike) -> bool:
    """Whether any two rewards differ, by exact equality."""
    rewards = np.asarray(rewards_G, dtype=np.float64)
    return bool((rewards != rewards[:1]).any())


def overlong_penalty(
    num_tokens: int, *, max_tokens: int, buffer_tokens: int, largest: float
) -> float:
    """DAPO's soft penalty for an output of `num_tokens` (arXiv 2503.14476, eq. 13), not negative.

    0 up to `max_tokens - buffer_tokens`, then linear, `largest` at `max_tokens`. The paper's
    `largest` is 1; without a buffer there is no penalty.

    >>> [overlong_penalty(n, max_tokens=20, buffer_tokens=4, largest=1.0) for n in (16, 17, 20)]
    [0.0, 0.25, 1.0]
    """
    if not buffer_tokens:
        return 0.0
    excess = num_tokens - (max_tokens - buffer_tokens)
    return largest * min(max(excess / buffer_tokens, 0.0), 1.0)


def kl_penalty(
    behaviour_L: NDArray[np.float32],
    reference_L: NDArray[np.float32],
    *,
    loss_mask_L: NDArray[np.bool_],
    coefficient: float,
) -> float:
    """`coefficient` times k1, the sum of behaviour - reference over unmasked tokens, in nats.

    It may be negative: only its mean over samples estimates a divergence.

    >>> import numpy as np
    >>> mask = np.array([True, True, False])
    >>> behaviour, reference = np.array([-1.0, -2.0, 0.0]), np.array([-2.0, -2.5, -9.0])
    >>> kl_penalty(behaviour, reference, loss_mask_L=mask, coefficient=0.1).__round__(6)
    0.15
    """
    differences = behaviour_L.astype(np.float64) - reference_L.astype(np.float64)
    return coefficient * float(differences[loss_mask_L].sum())


def shaped(sample: Sample, objective: ObjectiveOptions, *, max_tokens: int) -> Sample:
    """The sample with its penalties; KL in the reward reads the scores of the reference."""
    overlong = overlong_penalty(
        sample.episode.longest_turn,
        max_tokens=max_tokens,
        buffer_tokens=objective.overlong_buffer_tokens,
        largest=objective.overlong_penalty,
    )
    kl = 0.0
    if objective.kl_coefficient and not objective.kl_in_loss and sample.num_trained_tokens:
        kl = sum(
            kl_penalty(
                row.logprobs,
                part.scores[REFERENCE],
                loss_mask_L=row.loss_mask,
                coefficient=objective.kl_coefficient,
            )
            for part in sample.parts()
            for row in part.episode.rows
            if row.logprobs is not None
        )
    if not overlong and not kl:
        return sample
    return replace(sample, overlong_penalty=overlong, kl_penalty=kl)


def _preset(objective: ObjectiveOptions, longest: int) -> str:
    if not objective.preset:
        return ""
    typed = typed_out(objective.preset, max_generation_tokens=longest)
    sentence = f"--preset {objective.preset} stands for {typed}"
    named = preset_options(objective.preset, max_generation_tokens=longest)
    changed = [
        f"{flag(name)} {getattr(objective, name)}"
        for name, value in named.items()
        if getattr(objective, name) != value
    ]
    return f"{sentence}; changed by you: {' '.join(changed)}" if changed else sentence


def _clip(objective: ObjectiveOptions) -> str:
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    if objective.policy_loss == "cispo":
        return f"its value as a weight kept within [{max(low, 0):g}, {high:g}] (cispo)"
    bounds = f"clipped to [{low:g}, {high:g}]"
    if objective.dual_clip:
        bounds += f", below {objective.dual_clip:g} where the advantage is negative"
    return bounds


def _correction(objective: ObjectiveOptions, mode: str, lag: int) -> str:
    if objective.importance_correction != "none":
        return objective.correction_in_words
    if mode == "behaviour":
        return "none needed, the ratio contains it"
    if lag:
        return f"none, though samples may be of weights {lag} versions old: the gradient is biased"
    return "none"


def _penalties(objective: ObjectiveOptions) -> str:
    parts = []
    if objective.kl_coefficient:
        where = "loss" if objective.kl_in_loss else "reward"
        parts.append(f"{objective.kl_coefficient:g} * KL ({objective.kl_estimator}) in the {where}")
    if objective.entropy_coefficient:
        parts.append(f"an entropy bonus of {objective.entropy_coefficient:g}")
    return f"penalties: {', '.join(parts)}" if parts else ""


def _rewards(objective: ObjectiveOptions, sampling: SamplingOptions) -> str:
    parts = []
    if objective.overlong_buffer_tokens:
        parts.append(
            f"the last {objective.overlong_buffer_tokens} of {sampling.max_generation_tokens} "
            f"tokens cost up to {objective.overlong_penalty:g} of the reward"
        )
    if objective.mask_truncated_samples:
        parts.append("truncated outputs are not trained")
    if policy := CUT.get(sampling.length_limit_policy):
        parts.append(policy)
    if objective.use_ref_answers:
        trained = f", and trained with the weight {objective.ref_answer_coefficient:g}"
        how = trained if objective.ref_answer_coefficient else ", and not trained"
        parts.append(f"the reference answer is a member of its group{how}: a bias")
    if objective.dynamic_sampling:
        parts.append(
            f"a question without variance is replaced up to {objective.dynamic_sampling} times"
        )
    return f"samples: {'; '.join(parts)}" if parts else ""
