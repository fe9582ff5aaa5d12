"""Questions and demonstrations in one batch: GRPO on what was sampled, cross-entropy on the rest.

A teacher's squared gap is a divergence that both have.
"""

from dataclasses import replace

from async_grpo.algorithms.base import ScoreNeed
from async_grpo.algorithms.grpo import Grpo

TEACHER, GAMMA = "teacher:math", 0.25


class Mixed(Grpo):
    """GRPO, with terms on tokens that nobody sampled."""

    def __init__(self, config):
        super().__init__(config)
        self.needs = (*self.needs, ScoreNeed(TEACHER, of_given=True))

    def contributes(self, sample):
        return sample.num_trained_tokens > 0

    def loss(self, scored, packed):
        result = super().loss(scored, packed)
        gap = packed.scores[TEACHER] - scored.logprobs
        loss = result.loss + GAMMA * (packed.weights * gap.square()).sum()
        if packed.is_given is not None:
            loss = loss - (packed.weights * scored.logprobs)[packed.is_given].sum()
        return replace(result, loss=loss)
