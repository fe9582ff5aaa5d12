"""Cross-entropy of given pairs plus the whole KL(policy || other), as a head term."""

from async_grpo.algorithms.base import LossSums, ScoreNeed
from async_grpo.algorithms.sft import Sft

NUM_TOKENS = 64  # of the vocabulary


class KlToOther:
    name = "kl"

    def value(self, logprobs, rows):
        return (logprobs.exp() * (logprobs - rows["other"])).sum(-1)

    def gradient(self, logprobs, rows):
        return logprobs.exp() * (logprobs - rows["other"] + 1)


class DenseKl(Sft):
    needs = (ScoreNeed("other", num_columns=NUM_TOKENS),)
    terms = (KlToOther(),)

    def loss(self, scored, packed):
        kl = (packed.weights * scored.terms["kl"]).sum()
        return LossSums(super().loss(scored, packed).loss + 0.5 * kl, sums={"dense_kl_sum": kl})
