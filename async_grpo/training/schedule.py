"""The learning rate as a pure function of the gradient step."""

from __future__ import annotations

import math
from collections.abc import Callable

from async_grpo.config.train import TrainConfig


def learning_rate_factor(
    step: int, *, schedule: str, num_warmup_steps: int, num_steps: int
) -> float:
    """Fraction of the peak learning rate for gradient step `step`, counted from 0.

    Every schedule but `constant` rises linearly over the warm-up, whose first step is already above
    zero; `linear` and `cosine` then fall to zero behind the last of `num_steps`.

    >>> [learning_rate_factor(step, schedule="linear", num_warmup_steps=2, num_steps=6)
    ...  for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if schedule == "constant":
        return 1.0
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    if schedule == "constant_with_warmup":
        return 1.0
    progress = min((step - num_warmup_steps) / max(num_steps - num_warmup_steps, 1), 1.0)
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(
        f"lr_scheduler must be constant, constant_with_warmup, linear or cosine, got {schedule!r}"
    )


def make_lr_lambda(config: TrainConfig) -> Callable[[int], float]:
    """The factor for torch's LambdaLR over all gradient steps of the run."""
    num_steps = config.num_training_batches * config.steps_per_batch
    return lambda step: learning_rate_factor(
        step,
        schedule=config.lr_scheduler,
        num_warmup_steps=config.num_warmup_steps,
        num_steps=num_steps,
    )
