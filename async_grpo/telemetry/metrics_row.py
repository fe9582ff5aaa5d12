"""From sums to one line of `training_metrics.jsonl`.

Batcher and trainer ranks only add; the quotients of `schema.METRICS` are taken here, once, after
all sums have been merged. So no metric depends on how samples were spread over ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from async_grpo.telemetry.schema import METRIC_BY_NAME, METRICS, OF_RANKS, OF_TYPES
from async_grpo.types.metrics import Metric

Sums = Mapping[str, float | None]
Row = dict[str, float | int | None]
TIMED_OUT = ("generation timeout", "environment: timeout")  # samples dropped by the user's limits
ENDS = ("trained", "zero_contribution", "failed")  # the fates of samples that are not done again
COUNTS = re.compile(r"lag_\d+_(samples|tokens)|lost_(turns|tokens)_.+")  # counts with open names


def metrics_row(
    sums: Sums,
    *,
    fates: Mapping[str, int],
    reasons: Mapping[str, int],
    tokens: Mapping[str, int],
    declared: Sequence[Metric] = (),
) -> Row:
    """One line of the metrics file: every metric of the schema, the metrics that the algorithm has
    `declared`, then counts whose names depend on the run.

    `sums`: of the step's samples, over all ranks, and the facts of `schema.StepFacts`.
    The metrics of `schema.OF_TYPES` follow for each type, as `avg_reward/TYPE`, and those of
    `OF_RANKS` for each rank, as `peak_process_bytes/rank_0`.
    The counts are `fate_<name>`, `failed_<why>` and `discarded_<why>` where there are any, the same
    in tokens as `token_fate_<name>` and `token_fate_<name>_<why>`, `lost_turns_<why>`,
    `lost_tokens_<why>`, `lag_<n>_samples` and `lag_<n>_tokens`.
    A metric without its sums, with a denominator of 0, or that is not finite is None.
    """
    known = {**sums, "effective_tokens": effective_tokens(sums)}
    if timed_out := sum(reasons.get(f"failed: {stage}", 0) for stage in TIMED_OUT):
        known["timed_out_samples"] = timed_out
        known["ended_samples"] = sum(fates.get(fate, 0) for fate in ENDS)
    row: Row = {metric.name: _value(metric, known) for metric in (*METRICS, *declared)}
    row |= _of_types(sums) | _of_ranks(sums)
    row |= _counts("fate_", fates) | _counts("", reasons) | _counts("token_fate_", tokens)
    return row | _found_counts(sums) | _resampled(sums)


def _of_types(sums: Sums) -> Row:
    """
    >>> row = _of_types({"finished_samples/a": 4, "num_samples/a": 4, "reward_sum/a": 3.0})
    >>> row["num_samples/a"], row["avg_reward/a"], row["num_groups/a"]
    (4, 0.75, None)
    """
    types = (name.partition("/")[2] for name in sums if name.startswith("finished_samples/"))
    row: Row = {}
    for kind in sorted(types):
        end = f"/{kind}"
        own = {name.removesuffix(end): sums[name] for name in sums if name.endswith(end)}
        row |= {f"{name}{end}": _value(METRIC_BY_NAME[name], own) for name in OF_TYPES}
    return row


def _of_ranks(sums: Sums) -> Row:
    """
    >>> _of_ranks({"peak_process_bytes": 9.0, "peak_process_bytes/rank_0": 9.0, "loss": 1.0})
    {'peak_process_bytes/rank_0': 9}
    """
    starts = tuple(f"{name}/rank_" for name in OF_RANKS)
    return {name: int(value or 0) for name, value in sums.items() if name.startswith(starts)}


def effective_tokens(sums: Sums) -> float | None:
    """The effective number of tokens under their importance ratios (Kish's sample size).

    (sum of ratios) squared by the sum of squares, out of sums over all ranks: a mean of each rank's
    value would be another number. None without ratios.

    >>> effective_tokens({"mismatch_ratio_sum": 1 + 1 + 4, "mismatch_ratio_square_sum": 1 + 1 + 16})
    2.0
    """
    ratio_sum = sums.get("mismatch_ratio_sum")
    squares = sums.get("mismatch_ratio_square_sum")
    if not ratio_sum or not squares:
        return None
    return ratio_sum * (ratio_sum / squares)


def _value(metric: Metric, known: Mapping[str, float | None]) -> float | int | None:
    numerator = known.get(metric.numerator)
    denominator = known.get(metric.denominator) if metric.denominator else 1
    if numerator is None or not denominator:
        return None
    if not math.isfinite(numerator) or not math.isfinite(denominator):
        return None
    return int(numerator) if metric.is_count else float(numerator / denominator)


def _found_counts(sums: Sums) -> dict[str, int]:
    """Samples and tokens by lag, and turns and tokens that were lost, by cause.

    >>> _found_counts({"lag_0_samples": 6.0, "lag_1_tokens": 40.0, "lag_sum": 3.0, "lag_max": 1.0})
    {'lag_0_samples': 6, 'lag_1_tokens': 40}
    """
    found = {key: int(value or 0) for key, value in sums.items() if COUNTS.fullmatch(key)}
    return _counts("", found)


def _resampled(sums: Sums) -> Row:
    """Shares of the groups that were sampled again, by cause.

    >>> _resampled({"sampled_groups": 8.0, "resampled_groups_worker died": 2.0})
    {'perc_resampled_groups_worker_died': 0.25}
    """
    found = [name for name in sums if name.startswith("resampled_groups_")]
    shares = ((sums[name] or 0) / (sums["sampled_groups"] or 1) for name in found)
    names = ("perc_" + re.sub(r"\W+", "_", name) for name in found)
    return dict(zip(names, shares, strict=True))


def _counts(start: str, counts: Mapping[str, int]) -> dict[str, int]:
    """`counts` under names that every tracker accepts.

    >>> _counts("fate_", {"trained": 6, "zero_contribution": 2})
    {'fate_trained': 6, 'fate_zero_contribution': 2}
    >>> _counts("", {"discarded: worker died": 8, "failed: verification": 2})
    {'discarded_worker_died': 8, 'failed_verification': 2}
    """
    return {start + re.sub(r"\W+", "_", name): count for name, count in counts.items()}
