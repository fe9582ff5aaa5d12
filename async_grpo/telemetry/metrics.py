"""From sums to one line of `training_metrics.jsonl`.

Batcher and trainer ranks only ever add up; the quotients of `schema.METRICS` are taken here, once,
after everything has been merged. That is why no metric depends on the partition of the samples.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from async_grpo.telemetry.schema import METRICS, Metric

Sums = Mapping[str, float]
Row = dict[str, float | int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What trainer rank 0 knows of a gradient step; None where there is nothing to know."""

    step: int
    iteration: int
    total_samples_accumulated: int
    total_tokens: int
    optimizer_steps: int
    loss_denominator: float  # D of the aggregation
    grad_norm: float | None
    learning_rate: float
    seconds: float
    seconds_waiting: float
    seconds_publishing: float


def merge_sums(a: Sums, b: Sums) -> dict[str, float]:
    """Key by key the sum, or the maximum of keys that end in `_max`.

    >>> merge_sums({"reward_sum": 1.0, "lag_max": 2.0}, {"reward_sum": 0.5, "lag_max": 1.0})
    {'reward_sum': 1.5, 'lag_max': 2.0}
    """
    merged = dict(a)
    for key, value in b.items():
        if key not in merged:
            merged[key] = value
        elif key.endswith("_max"):
            merged[key] = max(merged[key], value)
        else:
            merged[key] += value
    return merged


def metrics_row(
    *, step: StepFacts, pipeline_sums: Sums, trainer_sums: Sums, fates: Mapping[str, int]
) -> Row:
    """One line of the metrics file: every metric of the schema, then `fate_<name>` counts.

    A metric without its sums, with a denominator of 0, or that is not finite is None.
    """
    known: dict[str, float | None] = {**pipeline_sums, **trainer_sums, **asdict(step)}
    row: Row = {metric.name: _value(metric, known) for metric in METRICS}
    return row | _fate_counts(fates)


def _value(metric: Metric, known: Mapping[str, float | None]) -> float | int | None:
    numerator = known.get(metric.numerator)
    denominator = known.get(metric.denominator) if metric.denominator else 1
    if numerator is None or not denominator:
        return None
    if not math.isfinite(numerator) or not math.isfinite(denominator):
        return None
    return int(numerator) if metric.is_count else float(numerator / denominator)


def _fate_counts(fates: Mapping[str, int]) -> dict[str, int]:
    """Keys that every tracker accepts as a name.

    >>> _fate_counts({"trained": 6, "failed(worker died)": 2})
    {'fate_trained': 6, 'fate_failed_worker_died': 2}
    """
    counts: Counter[str] = Counter()
    for fate, count in fates.items():
        counts["fate_" + re.sub(r"\W+", "_", fate).strip("_")] += count
    return dict(counts)
