"""The learning rate as a pure function of a clock, and the clocks of the optimizer's steps.

Legend: a position is counted in gradient steps taken, or in the samples (D of sample-mean) or the
tokens (D of token-mean) of these steps, in every pass over a batch. A skipped step moves none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from async_grpo.config.sampling_options import BatchingOptions
from async_grpo.config.training_options import OptimizerOptions


def learning_rate_factor(
    position: int,
    *,
    schedule: str,
    num_warmup: int,
    num_total: int,
    advance: int = 1,
    smallest: float = 0.0,
) -> float:
    """Fraction of the peak learning rate for the step that begins at `position`.

    Every schedule but `constant` rises linearly over the warm-up. There it is evaluated at the end
    of the step, `advance` later, so that the first step is above zero. `linear` and `cosine` then
    fall to `smallest`, which a step that begins at `num_total` would have.

    >>> [learning_rate_factor(step, schedule="linear", num_warmup=2, num_total=6)
    ...  for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> [learning_rate_factor(samples, schedule="linear", num_warmup=16, num_total=48, advance=8)
    ...  for samples in range(0, 48, 8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> [learning_rate_factor(step, schedule="linear", num_warmup=0, num_total=2, smallest=0.5)
    ...  for step in range(4)]
    [1.0, 0.75, 0.5, 0.5]
    """
    if schedule == "constant":
        return 1.0
    if position < num_warmup:
        return min((position + advance) / num_warmup, 1.0)
    if schedule == "constant_with_warmup":
        return 1.0
    progress = min((position - num_warmup) / max(num_total - num_warmup, 1), 1.0)
    if schedule == "linear":
        return smallest + (1.0 - smallest) * (1.0 - progress)
    return smallest + (1.0 - smallest) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True)
class Clocks:
    """How far the optimizer has come; a checkpoint saves it."""

    steps: int = 0  # gradient steps taken
    samples: int = 0  # counted in D of these steps
    tokens: int = 0  # unmasked output tokens of these samples

    def after(self, num_samples: int, num_tokens: int = 0) -> Clocks:
        """The clocks after one more step, of `num_samples` samples with `num_tokens` tokens."""
        return Clocks(self.steps + 1, self.samples + num_samples, self.tokens + num_tokens)


def learning_rate_after(
    clocks: Clocks,
    optimizer: OptimizerOptions,
    batching: BatchingOptions,
    *,
    num_samples: int,
    num_tokens: int,
    samples_per_slot: int,
) -> float:
    """The learning rate of the step that begins at `clocks`, of `num_samples` with `num_tokens`.

    `samples_per_slot`: samples that are planned for each slot of a batch.
    """
    clock, num_batches = optimizer.schedule_clock, batching.num_training_batches
    position, num_warmup = getattr(clocks, clock), optimizer.num_warmup
    advance = {"steps": 1, "samples": num_samples, "tokens": num_tokens}[clock]
    num_total = {
        "steps": num_batches * batching.steps_per_batch,
        "samples": num_batches * batching.batch_size * samples_per_slot * batching.num_passes,
        "tokens": optimizer.num_schedule_tokens,
    }[clock]
    return optimizer.learning_rate * learning_rate_factor(
        position,
        schedule=optimizer.lr_scheduler,
        # As a fraction: 0.07 of 100 steps is 7, which floats make 7.000000000000001.
        num_warmup=num_warmup or math.ceil(Fraction(str(optimizer.warmup_ratio)) * num_total),
        num_total=num_total,
        advance=advance,
        smallest=optimizer.min_learning_rate_ratio,
    )
