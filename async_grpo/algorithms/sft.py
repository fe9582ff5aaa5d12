"""Supervised training: cross-entropy of the completions of given pairs, a mean over all tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from async_grpo.algorithms.base import Algorithm, LossSums

if TYPE_CHECKING:
    from async_grpo.model.logprobs import TokenLogprobs
    from async_grpo.types import PackedMinibatch


class Sft(Algorithm):
    """Σ w_i * -lp over the trained tokens; each pair is a sample, at temperature 1."""

    learns_from_pairs = True
    aggregation = "token-mean"
    temperature = 1.0
    samples_per_slot = 1

    def loss(self, scored: TokenLogprobs, packed: PackedMinibatch) -> LossSums:
        return LossSums(-(packed.weights * scored.logprobs).sum())

    def in_words(self) -> tuple[str, ...]:
        return ("loss: cross-entropy of the completions, a mean over all tokens of the step",)
