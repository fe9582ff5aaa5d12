"""A run's metrics as Prometheus reads them: a name, labels and a number each. Pure.

Ray serves the gauges of every process of a node at the node's metrics port, with `ray_` before each
name: `avg_reward` is `ray_async_grpo_avg_reward{run="…"}` there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Row = Mapping[str, float | int | None]

PREFIX = "async_grpo_"
LABELS = ("run", "type", "rank")
NOT_A_NAME = re.compile(r"\W", re.ASCII)


@dataclass(frozen=True, slots=True)
class Point:
    """One number, as Prometheus keeps it."""

    name: str  # without the prefixes
    labels: tuple[str, ...]  # values, in the order of `LABELS`
    value: float


def points(row: Row, *, run: str) -> Iterator[Point]:
    """The numbers of a row of metrics; those of a type of questions, or of a rank, have its label.

    A metric without a value is none of them: Ray would serve no NaN.

    >>> row = {"avg_reward": 0.5, "avg_reward/sums": 0.75, "peak_process_bytes/rank_1": 9}
    >>> for point in points(row | {"kl": None}, run="first"):
    ...     print(point.name, point.labels, point.value)
    avg_reward ('first', '', '') 0.5
    avg_reward ('first', 'sums', '') 0.75
    peak_process_bytes ('first', '', '1') 9.0
    """
    for key, value in row.items():
        name, _, part = key.partition("/")
        is_rank = re.fullmatch(r"rank_\d+", part)
        labels = (run, "", part.removeprefix("rank_")) if is_rank else (run, part, "")
        if value is not None:
            yield Point(NOT_A_NAME.sub("_", name), labels, float(value))
