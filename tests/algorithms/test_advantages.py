import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.algorithms.grpo import group_advantages

METHODS = ("grpo", "dr", "rloo")
# Eighths: differences and shifts are exact in binary, so equal rewards stay equal.
rewards = st.lists(st.integers(-16, 16).map(lambda n: n / 8), min_size=2, max_size=16)


def oracle(values, method, eps):
    """Straight from the definitions, one member at a time."""
    if len(set(values)) <= 1:
        return [0.0] * len(values)
    mean = statistics.fmean(values)
    if method == "rloo":
        total, others = sum(values), len(values) - 1
        return [x - (total - x) / others for x in values]
    scale = statistics.stdev(values) + eps if method == "grpo" else 1.0
    return [(x - mean) / scale for x in values]


@given(rewards, st.sampled_from(METHODS))
def test_advantages_are_those_of_the_definition(values, method):
    got = group_advantages(values, method=method, eps=1e-4)
    np.testing.assert_allclose(got, oracle(values, method, 1e-4), rtol=1e-12, atol=1e-12)


@given(rewards, st.sampled_from(METHODS), st.integers(-8, 8))
def test_a_reward_for_everybody_changes_nothing(values, method, shift):
    shifted = [value + shift for value in values]
    np.testing.assert_allclose(
        group_advantages(shifted, method=method),
        group_advantages(values, method=method),
        atol=1e-12,
    )


@given(rewards, st.sampled_from(METHODS))
def test_advantages_of_a_group_sum_to_zero(values, method):
    assert abs(group_advantages(values, method=method).sum()) < 1e-10


@given(st.floats(-1e6, 1e6), st.integers(1, 64), st.sampled_from(METHODS))
def test_a_group_without_variance_is_exactly_zero(value, size, method):
    advantages = group_advantages([value] * size, method=method)
    assert advantages.tolist() == [0.0] * size


@pytest.mark.parametrize("method", METHODS)
def test_the_tiniest_variance_is_not_taken_for_none(method):
    low = 0.1
    advantages = group_advantages([low, np.nextafter(low, 1.0)], method=method)
    assert advantages[0] < 0 <= advantages[1] or advantages[0] <= 0 < advantages[1]


def test_grpo_divides_by_the_sample_standard_deviation():
    assert group_advantages([1, 0], eps=0.0).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])


@pytest.mark.parametrize("method", METHODS)
def test_one_lonely_member_has_no_advantage(method):
    assert group_advantages([3.0], method=method).tolist() == [0.0]


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="rewards must be finite"):
        group_advantages([1.0, float("nan")])
