"""On-policy distillation, sampled tokens: a teacher's log-probabilities add to each advantage.

    A_it = A_i + η clip(tea − sg(lp), ±c)          (Gu et al., MiniLLM, arXiv 2306.08543)

Everything else is GRPO's: ratio, clip, weights, denominator.
"""

from dataclasses import replace

from async_grpo.algorithms.base import ScoreNeed
from async_grpo.algorithms.grpo import Grpo
from async_grpo.types.metrics import Metric

GAP = Metric(
    "teacher_gap", "teacher_gap_sum", "trained_tokens", "nats", "Teacher's gap",
    "log-probability of a token under the teacher less that under the policy",
)  # fmt: skip
TEACHER = "teacher:math"
ETA, BOUND = 0.5, 2.0


class OnPolicyDistillation(Grpo):
    """GRPO whose advantages follow a teacher, token by token."""

    metrics = (GAP,)

    def __init__(self, config):
        super().__init__(config)
        self.needs = (*self.needs, ScoreNeed(TEACHER))

    def contributes(self, sample):
        return sample.num_trained_tokens > 0  # also without an advantage of its own

    def loss(self, scored, packed):
        gap = packed.scores[TEACHER] - scored.logprobs.detach()
        followed = packed.advantages + ETA * gap.clamp(-BOUND, BOUND)
        result = super().loss(scored, replace(packed, advantages=followed))
        return replace(result, sums={**result.sums, "teacher_gap_sum": gap.sum()})

    def in_words(self):
        return (*super().in_words(), f"teacher: {ETA:g} * clip(tea - lp, {BOUND:g}) a token")
