import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import make_sample, make_verdict

from async_grpo.batching.admission import StepKey
from async_grpo.batching.statistics import StepSums, group_sums
from async_grpo.telemetry.schema import SUM_KEYS
from async_grpo.types import VersionSpan, WeightsVersion

STEP, LATER = StepKey(3, 0), StepKey(3, 1)
VERSION = WeightsVersion(9, 3)


def older(batches, num_tokens=4):
    """Spans of a completion whose first token came from weights with `batches` batches."""
    spans = (VersionSpan(WeightsVersion(9, batches), 0, 1), VersionSpan(VERSION, 1, num_tokens))
    return {"num_tokens": num_tokens, "spans": spans}


def test_a_group_is_counted_in_full():
    unscorable = make_verdict(0.0, status="unscorable", format_reward=0.5)
    sums, maxima = group_sums(
        (
            make_sample(VERSION, reward=1.0, num_tokens=4),
            make_sample(VERSION, reward=0.25, num_tokens=6, finish_reason="length", advantage=0.0),
            make_sample(VERSION, verdict=unscorable, **older(1)),
        ),
        batch=3,
    )
    assert sums == {
        "num_samples": 3,
        "num_groups": 1,
        "reward_sum": 1.25,
        "max_reward_in_group_sum": 1.0,
        "format_reward_sum": 0.5,
        "format_reward_samples": 1,
        "output_tokens": 14,
        "prompt_tokens": 9,
        "truncated_samples": 1,
        "zero_advantage_samples": 1,
        "unscorable_samples": 1,
        "lag_sum": 2,
    }
    assert maxima == {"lag_max": 2}


def test_every_sum_has_a_metric_that_uses_it():
    sums, maxima = group_sums((make_sample(VERSION),), batch=3)
    assert not (sums.keys() | maxima.keys()) - SUM_KEYS


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.floats(0, 1)), min_size=1))
def test_the_order_of_arrival_changes_nothing(shapes):
    groups = [
        tuple(make_sample(VERSION, reward=reward, **older(batches, n + 1)) for n in range(1, 1 + k))
        for k, batches, reward in shapes
    ]
    results = []
    for order in (groups, random.Random(0).sample(groups, len(groups))):
        sums = StepSums()
        for group in order:
            sums.add(STEP, group, batch=3)
            for sample in group:
                sums.count_denominator(STEP, sample)
        results.append(sums.close(STEP))
    (first, second) = results
    assert (
        first[:2]
        == second[:2]
        == (
            sum(len(group) for group in groups),
            sum(sample.num_trained_tokens for group in groups for sample in group),
        )
    )
    assert first[2] == pytest.approx(second[2])
    assert first[2]["lag_max"] == max(3 - batches for _, batches, _ in shapes)


def test_masked_tokens_do_not_count_in_the_denominator():
    sums = StepSums()
    sums.count_denominator(STEP, make_sample(VERSION, num_tokens=6, num_masked=2))
    assert sums.close(STEP) == (1, 4, {})


def test_steps_are_counted_apart_and_forgotten():
    sums = StepSums()
    sums.add(LATER, (make_sample(VERSION, reward=0.5),), batch=3)
    sums.add(STEP, (make_sample(VERSION, reward=1.0),), batch=3)
    assert sums.current_reward() == (1.0, 1)
    assert sums.close(STEP)[2]["reward_sum"] == 1.0
    assert sums.current_reward() == (0.5, 1)
    assert sums.close(LATER)[2]["reward_sum"] == 0.5
    assert sums.close(STEP) == (0, 0, {})
    assert sums.current_reward() == (0.0, 0.0)


def test_zero_counts_stay_in_the_sums():
    sums = StepSums()
    sums.add(STEP, (make_sample(VERSION, reward=0.0),), batch=3)
    assert sums.close(STEP)[2]["reward_sum"] == 0.0
    sums.add(STEP, (make_sample(VERSION, reward=0.0),), batch=3)
    assert {"reward_sum", "lag_sum", "lag_max"} <= sums.close(STEP)[2].keys()
