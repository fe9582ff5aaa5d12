"""The learning rate as a pure function of a clock, and the clocks of the optimizer's steps.

Legend: a position is counted in gradient steps taken, or in the samples (D of sample-mean) of these
steps. A skipped step moves neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from async_grpo.config.train import TrainConfig

if TYPE_CHECKING:
    from torch.optim import Optimizer


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

    Every schedule but `constant` rises linearly over the warm-up, as far as the step will have
    moved the clock when it ends (by `advance`), so that the first step is already above zero;
    `linear` and `cosine` then fall to `smallest`, which a step that begins at `num_total` would
    have.

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
    if schedule == "cosine":
        return smallest + (1.0 - smallest) * 0.5 * (1.0 + math.cos(math.pi * progress))
    raise ValueError(
        f"lr_scheduler must be constant, constant_with_warmup, linear or cosine, got {schedule!r}"
    )


@dataclass(frozen=True, slots=True)
class Clocks:
    """How far the optimizer has come; what a checkpoint keeps of the schedule."""

    steps: int = 0  # gradient steps taken
    samples: int = 0  # that counted in D of these steps


class Scheduler:
    """Sets an optimizer's learning rate from the clock that the run chose."""

    def __init__(self, optimizer: Optimizer, config: TrainConfig, *, samples_per_slot: int) -> None:
        self.clocks = Clocks()
        self._optimizer = optimizer
        self._peak = config.learning_rate
        self._schedule = config.lr_scheduler
        self._by_samples = config.schedule_clock == "samples"
        self._smallest = config.min_learning_rate_ratio
        self._num_total = config.num_training_batches * (
            config.batch_size * samples_per_slot if self._by_samples else config.steps_per_batch
        )
        number = config.num_warmup_samples if self._by_samples else config.num_warmup_steps
        self._num_warmup = number or math.ceil(config.warmup_ratio * self._num_total)

    def learning_rate(self, num_samples: int) -> float:
        """Of a next step of `num_samples` samples."""
        return self._peak * learning_rate_factor(
            self.clocks.samples if self._by_samples else self.clocks.steps,
            schedule=self._schedule,
            num_warmup=self._num_warmup,
            num_total=self._num_total,
            advance=num_samples if self._by_samples else 1,
            smallest=self._smallest,
        )

    def set_rate(self, num_samples: int) -> None:
        """Set the optimizer's learning rate for a step of `num_samples` samples."""
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate(num_samples)

    def stepped(self, num_samples: int) -> None:
        """Move both clocks past the step that the optimizer has taken."""
        self.clocks = Clocks(self.clocks.steps + 1, self.clocks.samples + num_samples)
