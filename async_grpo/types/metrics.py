"""What a metric is: a quotient of two sums, so that it cannot depend on how they were added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from async_grpo.util.errors import ConfigError

Count = Literal[
    "samples", "questions", "tokens", "batches", "steps", "minibatches", "bytes", "restarts",
    "calls", "checkpoints", "alarms", "trackers", "lines",
]  # fmt: skip
Measure = Literal["", "fraction", "seconds", "nats", "1/s"]
Unit = Count | Measure
UNITS = (*get_args(Count), *get_args(Measure))
Window = Literal["step", "run"]


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` = `numerator` / `denominator` over `window`; without a denominator, the numerator."""

    name: str  # its key in `training_metrics.jsonl`
    numerator: str  # a key of `LossSums.sums`, or a sum of every run such as `num_samples`
    denominator: str  # likewise, such as `trained_tokens`; empty: the numerator itself
    unit: Unit  # any other one is refused
    label: str  # of a plot's axis, without the unit
    meaning: str  # a sentence
    window: Window = "step"  # run: of what only grows

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            known = ", ".join(map(repr, UNITS))
            raise ConfigError(
                f"the unit of a Metric must be one of {known}, got {self.unit!r} for {self.name}: "
                "give one of these, '' where none fits"
            )

    @property
    def is_count(self) -> bool:
        """Whether the value is a whole number."""
        return not self.denominator and self.unit in get_args(Count)
