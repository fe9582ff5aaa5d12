import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import make_completion, make_sample, make_verdict

from async_grpo.batching.admission import StepKey
from async_grpo.batching.statistics import SampleSums, StalenessError, group_sums, tokens_by_lag
from async_grpo.telemetry.metrics_row import COUNTS
from async_grpo.telemetry.schema import METRICS
from async_grpo.types import Episode, Group, VersionSpan, WeightsVersion

STEP, LATER = StepKey(3, 0), StepKey(3, 1)
VERSION = WeightsVersion(9, 3)


def older(batches, num_tokens=4):
    """Spans of a completion whose first token came from weights with `batches` batches."""
    spans = (VersionSpan(WeightsVersion(9, batches), 0, 1), VersionSpan(VERSION, 1, num_tokens))
    return {"num_tokens": num_tokens, "spans": spans}


def group(*samples, ordinal=0, attempt=0, is_replaced=False):
    return Group(ordinal, attempt, samples or (make_sample(VERSION),), is_replaced)


def close(*groups, max_staleness=3):
    sums = SampleSums(staleness_of=lambda _: max_staleness)
    for added in groups:
        sums.add(STEP, added)
    return sums.close(STEP)[2]


def of_grammar(num_tokens):
    return {"num_tokens": num_tokens, "is_constrained": True}


def test_a_group_is_counted_in_full():
    unscorable = make_verdict(0.0, status="unscorable", format_reward=0.5, cause="overrun")
    sums = group_sums(
        (
            make_sample(VERSION, reward=1.0, num_tokens=4, overlong_penalty=0.25),
            make_sample(
                VERSION, reward=0.25, finish_reason="length", advantage=0.0, **of_grammar(6)
            ),
            make_sample(VERSION, verdict=unscorable, num_masked=4, kl_penalty=-0.5, **older(1)),
        )
    )
    assert sums == {
        "num_samples": 3,
        "finished_samples": 3,
        "failed_samples": 0,
        "overrun_samples": 1,
        "num_groups": 1,
        "reward_sum": 1.25,
        "correct_samples": 1,
        "max_reward_in_group_sum": 1.0,
        "format_reward_sum": 0.5,
        "format_reward_samples": 1,
        "overlong_penalty_sum": 0.25,
        "kl_penalty_sum": -0.5,
        "output_tokens": 14,
        "constrained_tokens": 6,
        "prompt_tokens": 9,
        "truncated_samples": 1,
        "masked_samples": 1,
        "zero_advantage_samples": 1,
        "unscorable_samples": 1,
        "given_samples": 0,
        "num_replacements": 0,
        "replaced_tokens": 0,
    }


def test_lag_is_counted_a_sample_and_a_token():
    sums = close(
        group(make_sample(VERSION, **older(1)), make_sample(VERSION, **older(2, num_tokens=6))),
        group(make_sample(VERSION), ordinal=1),
    )
    lag = {key: value for key, value in sums.items() if "lag" in key}
    assert lag == {
        "lag_sum": 3, "token_lag_sum": 3, "lag_max": 2,
        "lag_0_samples": 1, "lag_1_samples": 1, "lag_2_samples": 1, "lag_3_samples": 0,
        "lag_0_tokens": 12, "lag_1_tokens": 1, "lag_2_tokens": 1, "lag_3_tokens": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("batches", "lag"), [(1, 2), (4, -1)])
def test_a_token_too_old_or_from_the_future_is_never_counted_silently(batches, lag):
    with pytest.raises(StalenessError, match=rf"lag must be in 0\.\.1 .* got {lag}:"):
        close(group(make_sample(VERSION, **older(batches))), max_staleness=1)
    replaced = group(make_sample(VERSION, **older(batches)), is_replaced=True)
    with pytest.raises(StalenessError):
        close(replaced, max_staleness=1)


def test_replaced_groups_are_counted_apart():
    kept = make_sample(VERSION, reward=1.0)
    replaced = [make_sample(VERSION, reward=0.5, num_tokens=7)] * 2
    sums = close(
        group(*replaced, is_replaced=True),
        group(*replaced, attempt=1, is_replaced=True),
        group(kept, attempt=2),
    )
    alone = close(group(kept))
    expected = alone | {
        "num_replacements": 2, "replaced_samples": 4, "replaced_reward_sum": 2.0,
        "replaced_tokens": 28,
    }  # fmt: skip
    assert sums == expected


def test_a_step_whose_slots_failed_after_replacements_knows_these():
    sums = close(group(is_replaced=True))
    assert (sums["num_replacements"], "num_samples" in sums, "lag_max" in sums) == (1, False, False)


def test_every_sum_has_a_metric_that_uses_it():
    sums = close(group(), group(is_replaced=True, ordinal=1))
    used = {key for metric in METRICS for key in (metric.numerator, metric.denominator)}
    assert not {key for key in sums.keys() - used if not COUNTS.fullmatch(key)}


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.floats(0, 1)), min_size=1))
def test_the_order_of_arrival_changes_nothing_not_even_a_last_bit(shapes):
    groups = [
        group(
            *(
                make_sample(VERSION, reward=reward, **older(batches, n + 1))
                for n in range(1, 1 + k)
            ),
            ordinal=ordinal,
        )
        for ordinal, (k, batches, reward) in enumerate(shapes)
    ]
    results = []
    for order in (groups, random.Random(0).sample(groups, len(groups))):
        sums = SampleSums(staleness_of=lambda _: 3)
        for arrived in order:
            sums.add(STEP, arrived)
            for sample in arrived.samples:
                sums.count_denominator(STEP, sample)
        results.append(sums.close(STEP))
    assert results[0] == results[1]
    num_samples = sum(len(added.samples) for added in groups)
    num_tokens = sum(sample.num_trained_tokens for added in groups for sample in added.samples)
    assert results[0][:2] == (num_samples, num_tokens)
    assert results[0][2]["lag_max"] == max(3 - batches for _, batches, _ in shapes)


def test_masked_tokens_do_not_count_in_the_denominator():
    sums = SampleSums(staleness_of=lambda _: 0)
    sums.count_denominator(STEP, make_sample(VERSION, num_tokens=6, num_masked=2))
    sums.count_denominator(STEP, make_sample(VERSION, num_tokens=6, num_masked=6))
    assert sums.close(STEP) == (2, 4, {})


def test_steps_are_counted_apart_and_forgotten():
    sums = SampleSums(staleness_of=lambda _: 0)
    sums.add(LATER, group(make_sample(VERSION, reward=0.5)))
    sums.add(STEP, group(make_sample(VERSION, reward=1.0)))
    assert sums.current_reward() == (1.0, 1)
    assert sums.close(STEP)[2]["reward_sum"] == 1.0
    assert sums.current_reward() == (0.5, 1)
    assert sums.close(LATER)[2]["reward_sum"] == 0.5
    assert sums.close(STEP) == (0, 0, {})
    assert sums.current_reward() == (0.0, 0.0)


def test_zero_counts_stay_in_the_sums():
    sums = close(group(make_sample(VERSION, reward=0.0)))
    assert sums["reward_sum"] == 0.0
    assert {"reward_sum", "lag_sum", "lag_max"} <= sums.keys()


def test_a_reference_answer_counts_apart_and_has_no_lag():
    sampled = make_sample(VERSION, **older(1))
    (row,) = sampled.episode.rows
    told = replace(row, logprobs=None, weights_versions=())
    sums = close(group(sampled, replace(sampled, episode=Episode((told,)))))
    assert (sums["num_samples"], sums["sampled_samples"], sums["given_samples"]) == (1, 1, 1)
    assert (sums["finished_samples"], sums["ref_answers"]) == (2, 1)
    assert (sums["lag_sum"], sums["lag_2_samples"], sums["lag_0_samples"]) == (2, 1, 0)


def completion(*spans, num_tokens=None):
    """(batches in the weights, start, stop) of each span."""
    stop = spans[-1][2] if num_tokens is None else num_tokens
    made = tuple(VersionSpan(WeightsVersion(9, b), start, end) for b, start, end in spans)
    turn = make_completion(None, num_tokens=stop, spans=made)
    return Episode.of_turn(turn.token_ids[:1], turn)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=6))
def test_every_token_is_counted_by_the_weights_that_sampled_it(runs):
    lags = [lag for lag, length in runs for _ in range(length)]
    position, spans = 0, []
    for lag, length in runs:
        spans.append((7 - lag, position, position + length))
        position += length
    counts = tokens_by_lag(completion(*spans), batch=7, max_staleness=3)
    assert counts == {lag: lags.count(lag) for lag in set(lags)}


def test_the_lag_of_a_sample_is_that_of_its_oldest_token_not_of_an_empty_span():
    counts = tokens_by_lag(completion((0, 0, 0), (2, 0, 4)), batch=3, max_staleness=1)
    assert counts == {1: 4}


@pytest.mark.parametrize(("batches", "lag"), [(1, 2), (4, -1)])
def test_one_token_outside_the_bound_is_a_bug_with_a_name(batches, lag):
    spans = completion((3, 0, 9), (batches, 9, 10))
    with pytest.raises(StalenessError, match=f"got {lag}: tokens of version {batches} reached"):
        tokens_by_lag(spans, batch=3, max_staleness=1)
