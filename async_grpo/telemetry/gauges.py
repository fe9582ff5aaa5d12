"""A run's metrics as Prometheus reads them: a name, labels and a number each.

Ray serves the gauges of every process of a node at the node's metrics port, with `ray_` before each
name: `avg_reward` is `ray_async_grpo_avg_reward{run="…"}` there. It sends a gauge to the node's
agent once, and the agent forgets it after two of its intervals of 10 s: to stay visible until the
next step ends, gauges must be set repeatedly.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from async_grpo.telemetry.schema import METRIC_BY_NAME, METRICS, axis_label

if TYPE_CHECKING:
    from ray.util.metrics import Gauge

logger = logging.getLogger(__name__)
Row = Mapping[str, float | int | None]

EVALUATIONS = METRIC_BY_NAME.keys() - {metric.name for metric in METRICS}
REPEATED_S = 5.0  # after which gauges are set again
PREFIX = "async_grpo_"
LABELS = ("run", "type", "rank")
NOT_A_NAME = re.compile(r"\W", re.ASCII)
Point = tuple[str, dict[str, str], float]  # name without prefixes, values by label, number


def points(row: Row, *, run: str) -> Iterator[Point]:
    """The numbers of a row of metrics; those of a type of questions, or of a rank, have its label.

    Metrics without a value are left out, because Ray serves no NaN.

    >>> row = {"avg_reward": 0.5, "avg_reward/sums": 0.75, "peak_process_bytes/rank_1": 9}
    >>> for name, labels, value in points(row | {"kl": None}, run="first"):
    ...     print(name, *labels.items(), value)
    avg_reward ('run', 'first') ('type', '') ('rank', '') 0.5
    avg_reward ('run', 'first') ('type', 'sums') ('rank', '') 0.75
    peak_process_bytes ('run', 'first') ('type', '') ('rank', '1') 9.0
    """
    for key, value in row.items():
        name, _, part = key.partition("/")
        is_rank = re.fullmatch(r"rank_\d+", part)
        labels = (run, "", part.removeprefix("rank_")) if is_rank else (run, part, "")
        if value is not None:
            yield NOT_A_NAME.sub("_", name), dict(zip(LABELS, labels, strict=True)), float(value)


class RayGauges:
    """The newest metrics of a run. The training thread sets them, the watching one repeats them.

    Needs a process that has joined a Ray cluster. An error of Ray ends the gauges, not the run.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._points: dict[str, tuple[Point, ...]] = {}  # {kind of row: those of the newest row}
        self._gauges: dict[str, Gauge] = {}
        self._is_broken = False
        self._set_at_s = 0.0
        self._lock = threading.Lock()

    def see_step(self, row: Row) -> None:
        """Show a gradient step's row of metrics from now on."""
        self._see("step", row)

    def see_evaluation(self, row: Row) -> None:
        """Show an evaluation's row from now on, without the sums in it."""
        named = {key: row[key] for key in row if key.partition("/")[0] in EVALUATIONS}
        self._see("evaluation", named)

    def repeat(self) -> None:
        """Set the gauges again, unless they were set less than `REPEATED_S` ago."""
        with self._lock:
            if time.monotonic() - self._set_at_s >= REPEATED_S:
                self._set()

    def _see(self, kind: str, row: Row) -> None:
        with self._lock:
            self._points[kind] = tuple(points(row, run=self._run))
            self._set()

    def _set(self) -> None:
        if self._is_broken:
            return
        self._set_at_s = time.monotonic()
        try:
            for name, labels, value in chain(*self._points.values()):
                self._gauge(name).set(value, tags=labels)
        except Exception as error:  # Ray's own, of any kind
            self._is_broken = True
            logger.warning("Prometheus gets no metrics of this run any more: %s", error)

    def _gauge(self, name: str) -> Gauge:
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            known = METRIC_BY_NAME.get(name)
            meaning = known.meaning if known else axis_label(name)
            self._gauges[name] = Gauge(PREFIX + name, meaning, LABELS)
        return self._gauges[name]
