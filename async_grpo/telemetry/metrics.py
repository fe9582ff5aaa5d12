"""From sums to one line of `training_metrics.jsonl`.

Batcher and trainer ranks only ever add up; the quotients of `schema.METRICS` are taken here, once,
after everything has been merged. That is why no metric depends on the partition of the samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from async_grpo.telemetry.schema import METRICS
from async_grpo.types.metrics import Metric

Sums = Mapping[str, float]
Row = dict[str, float | int | None]
ENDS = ("trained", "zero_contribution", "failed")  # the fates of samples that are not done again
LAG_BIN = re.compile(r"lag_\d+_(samples|tokens)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What trainer rank 0 knows of a gradient step; None where there is nothing to know."""

    step: int
    iteration: int
    total_samples_accumulated: int
    total_tokens: int
    total_seconds: float
    optimizer_steps: int
    optimizer_samples: int = 0
    skipped_steps_no_samples: int = 0
    skipped_steps_non_finite: int = 0
    loss_denominator: float  # D of the aggregation
    grad_norm: float | None
    learning_rate: float
    seconds: float
    seconds_waiting: float
    seconds_publishing: float
    seconds_checkpointing: float = 0.0
    failed_checkpoints: int = 0
    batcher_restarts: int = 0
    sync_batches: int | None = None  # of the latest finished sync, as all below
    sync_seconds: float | None = None
    sync_pause_seconds: float | None = None
    sync_bytes: int | None = None
    recomputed_tokens: int | None = None
    canary_max: float | None = None
    canary_mean: float | None = None


def metrics_row(
    *,
    step: StepFacts,
    pipeline_sums: Sums,
    trainer_sums: Sums,
    fates: Mapping[str, int],
    reasons: Mapping[str, int] | None = None,
    declared: Sequence[Metric] = (),
) -> Row:
    """One line of the metrics file: every metric of the schema, those that its algorithm has
    `declared`, then counts that nobody can list.

    These are `fate_<name>`, `failed_<why>` and `discarded_<why>` of them where there are any, and
    `lag_<n>_samples` and `lag_<n>_tokens` from the pipeline's sums.
    A metric without its sums, with a denominator of 0, or that is not finite is None.
    """
    known: dict[str, float | None] = {
        **pipeline_sums,
        **trainer_sums,
        "effective_tokens": effective_tokens(trainer_sums),
        **asdict(step),
    }
    if timed_out := (reasons or {}).get("failed: generation timeout"):
        known["timed_out_samples"] = timed_out
        known["ended_samples"] = sum(fates.get(fate, 0) for fate in ENDS)
    row: Row = {metric.name: _value(metric, known) for metric in (*METRICS, *declared)}
    return row | _fate_counts(fates) | _reason_counts(reasons or {}) | _lag_histogram(pipeline_sums)


def effective_tokens(trainer_sums: Sums) -> float | None:
    """Tokens that weigh as much as all with their importance ratios (Kish's sample size).

    (sum of ratios) squared by the sum of squares, out of sums over all ranks: a mean of the ranks'
    own values would be another number. None without them.

    >>> effective_tokens({"mismatch_ratio_sum": 1 + 1 + 4, "mismatch_ratio_square_sum": 1 + 1 + 16})
    2.0
    """
    squares = trainer_sums.get("mismatch_ratio_square_sum")
    if not squares:
        return None
    ratio_sum = trainer_sums["mismatch_ratio_sum"]
    return ratio_sum * (ratio_sum / squares)


def _value(metric: Metric, known: Mapping[str, float | None]) -> float | int | None:
    numerator = known.get(metric.numerator)
    denominator = known.get(metric.denominator) if metric.denominator else 1
    if numerator is None or not denominator:
        return None
    if not math.isfinite(numerator) or not math.isfinite(denominator):
        return None
    return int(numerator) if metric.is_count else float(numerator / denominator)


def _lag_histogram(sums: Sums) -> dict[str, int]:
    """Samples and tokens by lag: as many keys as --max-staleness allows.

    >>> _lag_histogram({"lag_0_samples": 6.0, "lag_1_tokens": 40.0, "lag_sum": 3.0, "lag_max": 1.0})
    {'lag_0_samples': 6, 'lag_1_tokens': 40}
    """
    return {key: int(value) for key, value in sums.items() if LAG_BIN.fullmatch(key)}


def _fate_counts(fates: Mapping[str, int]) -> dict[str, int]:
    """Keys that every tracker accepts as a name.

    >>> _fate_counts({"trained": 6, "zero_contribution": 2})
    {'fate_trained': 6, 'fate_zero_contribution': 2}
    """
    return {f"fate_{fate}": count for fate, count in fates.items()}


def _reason_counts(reasons: Mapping[str, int]) -> dict[str, int]:
    """Samples of the fates `failed` and `discarded`, by reason.

    >>> _reason_counts({"discarded: worker died": 8, "failed: verification": 2})
    {'discarded_worker_died': 8, 'failed_verification': 2}
    """
    return {re.sub(r"\W+", "_", reason): count for reason, count in reasons.items()}
