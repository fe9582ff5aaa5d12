import json
import math
from functools import reduce

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from async_grpo.telemetry.metrics_row import effective_tokens, metrics_row
from async_grpo.telemetry.schema import METRICS

PREDECESSORS_KEYS = (
    "step", "iteration", "total_samples_accumulated", "avg_reward", "avg_max_reward_in_group",
    "avg_output_tokens", "entropy", "perc_truncated_samples", "perc_with_0_advantage",
)  # fmt: skip

FACTS = {
    "step": 7, "iteration": 6, "total_samples_accumulated": 56, "loss_denominator": 8.0,
    "seconds": 4.0, "seconds_waiting": 1.0,
}  # fmt: skip


def row(pipeline_sums=None, trainer_sums=None, fates=None, reasons=None):
    sums = {**(pipeline_sums or {}), **(trainer_sums or {}), **FACTS}
    return metrics_row(sums, fates=fates or {}, reasons=reasons or {}, tokens={})


# Sums of one sample: eighths, so that additions are exact in any order; None: key left out.
def merge_sums(a, b):
    """Key by key the sum, or the maximum of keys that end in `_max`."""
    return {
        key: (max if key.endswith("_max") else sum)([part[key] for part in (a, b) if key in part])
        for key in a | b
    }


KEYS = sorted(
    {key for metric in METRICS for key in (metric.numerator, metric.denominator) if key}
    | {"mismatch_ratio_sum", "mismatch_ratio_square_sum"}
)
NUMBERS = st.none() | st.integers(-800, 800).map(lambda eighths: eighths / 8)
sample_sums = st.lists(NUMBERS, min_size=len(KEYS), max_size=len(KEYS)).map(
    lambda values: {k: v for k, v in zip(KEYS, values, strict=True) if v is not None}
)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(sample_sums, min_size=1, max_size=8), st.data())
def test_metrics_do_not_depend_on_how_samples_were_partitioned(samples, data):
    parts = [[] for _ in range(4)]
    for sample in data.draw(st.permutations(samples)):
        parts[data.draw(st.integers(0, 3))].append(sample)
    per_rank = [reduce(merge_sums, part, {}) for part in parts]
    assert row(reduce(merge_sums, per_rank, {})) == row(reduce(merge_sums, samples, {}))


def test_quotients_are_of_whole_sums_not_means_of_means():
    one_rank = {"reward_sum": 3.0, "num_samples": 3.0}
    other_rank = {"reward_sum": 0.0, "num_samples": 1.0}
    assert row(merge_sums(one_rank, other_rank))["avg_reward"] == 0.75


def test_keys_that_end_in_max_are_merged_by_maximum_even_when_negative():
    merged = merge_sums({"lag_max": -3.0}, {"lag_max": -1.0, "mismatch_max": 0.5})
    assert merged == {"lag_max": -1.0, "mismatch_max": 0.5}


def test_merging_leaves_its_arguments_alone():
    a, b = {"loss_sum": 1.0}, {"loss_sum": 2.0}
    merge_sums(a, b)
    assert (a, b) == ({"loss_sum": 1.0}, {"loss_sum": 2.0})


def test_numbers_of_a_known_step():
    got = row(
        {"num_samples": 8.0, "num_groups": 2.0, "reward_sum": 6.0, "max_reward_in_group_sum": 2.0,
         "output_tokens": 160.0, "truncated_samples": 2.0, "zero_advantage_samples": 4.0,
         "format_reward_sum": 1.0, "format_reward_samples": 4.0, "lag_sum": 4.0, "lag_max": 1.0,
         "sampled_samples": 8.0},
        {"loss_sum": 4.0, "entropy_sum": 50.0, "trained_tokens": 100.0, "clipped_tokens": 10.0,
         "sampled_tokens": 100.0, "packed_tokens": 300.0, "data_tokens": 300.0,
         "budget_tokens": 400.0, "mismatch_max": 0.01},
        {"trained": 4, "zero_contribution": 4, "failed": 1},
        reasons={"failed: verification": 1, "discarded: lease revoked": 8},
    )  # fmt: skip
    expected = {
        "step": 7, "iteration": 6, "total_samples_accumulated": 56, "num_samples": 8,
        "avg_reward": 0.75, "avg_max_reward_in_group": 1.0, "avg_output_tokens": 20.0,
        "perc_truncated_samples": 0.25, "perc_with_0_advantage": 0.5, "avg_format_reward": 0.25,
        "avg_lag": 0.5, "max_lag": 1, "loss": 0.5, "entropy": 0.5, "clip_fraction": 0.1,
        "packing_efficiency": 0.75, "mismatch_max": 0.01, "tokens_per_second": 40.0,
        "trained_tokens_per_second": 25.0, "data_tokens_per_second": 75.0,
        "trainer_idle_fraction": 0.25, "kl": None,
        "fate_trained": 4, "fate_zero_contribution": 4, "fate_failed": 1,
        "failed_verification": 1, "discarded_lease_revoked": 8,
    }  # fmt: skip
    assert {key: got[key] for key in expected} == expected
    assert got["perc_timed_out_samples"] is None
    assert isinstance(got["num_samples"], int)


def ratio_sums(*ratios):
    return {
        "mismatch_ratio_sum": sum(ratios),
        "mismatch_ratio_square_sum": sum(ratio**2 for ratio in ratios),
        "sampled_tokens": float(len(ratios)),
    }


def test_the_effective_sample_size_is_of_all_ranks_tokens_together():
    one_rank, other_rank = ratio_sums(1.0, 1.0, 1.0), ratio_sums(4.0)
    merged = merge_sums(one_rank, other_rank)
    assert effective_tokens(merged) == pytest.approx(7.0**2 / 19.0)
    assert effective_tokens(one_rank) + effective_tokens(other_rank) == 4.0
    assert row({}, merged)["effective_sample_size"] == pytest.approx(7.0**2 / 19.0 / 4)


def test_equal_ratios_are_worth_all_tokens_whatever_their_value():
    for ratio in (0.01, 1.0, 30.0):
        assert effective_tokens(ratio_sums(*[ratio] * 5)) == pytest.approx(5.0)


def test_an_effective_sample_size_that_nobody_measured_is_null():
    assert effective_tokens({}) is None
    assert row({}, {"sampled_tokens": 4.0})["effective_sample_size"] is None
    assert row({}, ratio_sums(0.0, 0.0))["effective_sample_size"] is None


def test_lag_is_carried_as_a_histogram_beside_the_metrics():
    bins = {"lag_0_samples": 6, "lag_1_samples": 2, "lag_0_tokens": 90, "lag_1_tokens": 3}
    sums = {"lag_sum": 2.0, "token_lag_sum": 3.0, "output_tokens": 93.0, "lag_max": 1.0}
    got = row({**sums, **{key: float(value) for key, value in bins.items()}})
    assert {key: value for key, value in got.items() if key.startswith("lag_")} == bins
    assert (got["max_lag"], got["avg_token_lag"]) == (1, pytest.approx(3 / 93))
    assert all(isinstance(got[key], int) for key in bins)


def test_lag_merges_over_parts_of_a_step():
    merged = merge_sums(
        {"lag_1_tokens": 4.0, "lag_max": 1.0}, {"lag_1_tokens": 5.0, "lag_max": 2.0}
    )
    assert merged == {"lag_1_tokens": 9.0, "lag_max": 2.0}


def test_the_predecessors_keys_are_all_there():
    assert set(PREDECESSORS_KEYS) <= set(row())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(bad):
    got = row({"reward_sum": bad, "num_samples": 2.0}, {"mismatch_max": bad})
    assert got["avg_reward"] is None
    assert got["mismatch_max"] is None
    assert "NaN" not in json.dumps(got)


def test_a_step_without_samples_has_nulls_not_errors():
    got = row({"reward_sum": 0.0, "num_samples": 0.0})
    assert got["avg_reward"] is None
    assert got["num_samples"] == 0


def test_every_row_has_every_metric_once():
    assert list(row()) == [metric.name for metric in METRICS]
    assert len(row()) == len(METRICS)


def test_the_share_that_took_too_long_is_of_all_samples_that_ended():
    fates = {"trained": 10, "zero_contribution": 2, "failed": 4, "discarded": 9, "replaced": 5}
    got = row(fates=fates, reasons={"failed: generation timeout": 3, "failed: verification": 1})
    assert (got["perc_timed_out_samples"], got["failed_generation_timeout"]) == (3 / 16, 3)
