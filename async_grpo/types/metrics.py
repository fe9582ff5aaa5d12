"""What a metric is: a quotient of two sums, so that it cannot depend on who added what up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Count = Literal[
    "samples", "questions", "tokens", "batches", "steps", "minibatches", "bytes", "restarts",
    "calls", "checkpoints", "alarms", "trackers",
]  # fmt: skip
Unit = Count | Literal["", "fraction", "seconds", "nats", "1/s"]
Window = Literal["step", "run"]


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` = `numerator` / `denominator` over `window`; no denominator: the numerator itself."""

    name: str
    numerator: str
    denominator: str
    unit: Unit
    label: str  # of a plot's axis, without the unit
    meaning: str
    window: Window = "step"

    @property
    def is_count(self) -> bool:
        """Whether the value is a whole number."""
        return not self.denominator and self.unit in get_args(Count)
