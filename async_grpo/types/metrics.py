"""What a metric is: a quotient of two sums, so that it cannot depend on who added what up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal[
    "", "fraction", "samples", "questions", "tokens", "batches", "steps", "minibatches",
    "seconds", "nats", "bytes", "1/s", "restarts", "calls", "checkpoints",
]  # fmt: skip
Window = Literal["step", "run"]
COUNT_UNITS = frozenset(
    {"samples", "questions", "tokens", "batches", "steps", "minibatches", "bytes"}
    | {"restarts", "calls", "checkpoints"}
)


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
        return not self.denominator and self.unit in COUNT_UNITS
