"""How fast what a process holds grows with the work that it has done. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Slope:
    """A straight line through measurements, least squares."""

    per_thousand: float  # growth in 1,000 batches
    error: float  # one standard error of it
    first: float  # the line at the first measurement
    last: float

    @property
    def is_growth(self) -> bool:
        """Whether it is more than noise: three standard errors above nothing."""
        return self.per_thousand > 3 * self.error


def slope(batches: Sequence[float], values: Sequence[float]) -> Slope:
    """The growth of `values` with `batches`, both in the order of time.

    >>> slope([0, 500, 1000], [10.0, 11.0, 12.0])
    Slope(per_thousand=2.0, error=0.0, first=10.0, last=12.0)
    """
    x, y = np.asarray(batches, dtype=float), np.asarray(values, dtype=float)
    centred = x - x.mean()
    spread = float(centred @ centred)
    if len(x) < 3 or spread == 0:
        raise ValueError(f"a slope needs 3 measurements at different batches, got {len(x)}")
    rate = float(centred @ (y - y.mean())) / spread
    left = y - y.mean() - rate * centred
    error = float(np.sqrt(max(float(left @ left), 0.0) / (len(x) - 2) / spread))
    ends = (float(y.mean() + rate * centred[0]), float(y.mean() + rate * centred[-1]))
    return Slope(round(1000 * rate, 9), round(1000 * error, 9), *(round(end, 9) for end in ends))


def after_warm_up(
    samples: Sequence[Mapping[str, float]], *, share: float
) -> Sequence[Mapping[str, float]]:
    """The samples of the last part of the batches: caches fill in the beginning.

    >>> after_warm_up([{"batch": 0}, {"batch": 40}, {"batch": 100}], share=0.3)
    [{'batch': 40}, {'batch': 100}]
    """
    total = samples[-1]["batch"]
    return [sample for sample in samples if sample["batch"] >= share * total]
