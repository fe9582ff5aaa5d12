"""Hands a run's metrics to Ray, whose agent on this node serves them to Prometheus.

Ray sends a gauge to the agent once, and the agent forgets it after two of its intervals of 10 s:
what is to be seen until the next step ends has to be said again and again.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from async_grpo.telemetry.gauges import LABELS, PREFIX, Point, Row, points
from async_grpo.telemetry.schema import METRIC_BY_NAME, METRICS, axis_label

logger = logging.getLogger(__name__)
EVALUATIONS = METRIC_BY_NAME.keys() - {metric.name for metric in METRICS}
REPEATED_S = 5.0  # after which the newest are said again


class RayGauges:
    """The newest metrics of a run; the thread that trains tells them, the one that watches repeats.

    Needs a process that has joined a Ray cluster. Ray that refuses costs the gauges, not the run.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._shown: dict[str, tuple[Point, ...]] = {}  # by kind of row
        self._gauges: dict[str, Any] = {}
        self._is_broken = False
        self._said_at_s = 0.0
        self._lock = threading.Lock()

    def see_step(self, row: Row) -> None:
        """Show a gradient step's line of metrics from now on."""
        self._see("step", row)

    def see_evaluation(self, row: Row) -> None:
        """Show an evaluation's line from now on, without the sums in it."""
        named = {key: row[key] for key in row if key.partition("/")[0] in EVALUATIONS}
        self._see("evaluation", named)

    def repeat(self) -> None:
        """Say the newest again, unless that has just been done."""
        with self._lock:
            if time.monotonic() - self._said_at_s >= REPEATED_S:
                self._say()

    def _see(self, kind: str, row: Row) -> None:
        with self._lock:
            self._shown[kind] = tuple(points(row, run=self._run))
            self._say()

    def _say(self) -> None:
        if self._is_broken:
            return
        self._said_at_s = time.monotonic()
        try:
            for shown in self._shown.values():
                for point in shown:
                    labels = dict(zip(LABELS, point.labels, strict=True))
                    self._gauge(point.name).set(point.value, tags=labels)
        except Exception as error:  # Ray's own, of any kind
            self._is_broken = True
            logger.warning("Prometheus gets no metrics of this run any more: %s", error)

    def _gauge(self, name: str) -> Any:
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            known = METRIC_BY_NAME.get(name)
            meaning = known.meaning if known else axis_label(name)
            self._gauges[name] = Gauge(PREFIX + name, meaning, LABELS)
        return self._gauges[name]
