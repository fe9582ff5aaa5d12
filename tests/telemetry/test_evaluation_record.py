"""pass@k against every subset there is, and intervals against what is known of them."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.telemetry.evaluation_record import bootstrap_intervals, pass_at_k


@st.composite
def counts(draw):
    num_samples = draw(st.integers(1, 10))
    return (
        num_samples,
        draw(st.integers(0, num_samples)),
        draw(st.integers(1, num_samples)),
    )


@given(counts())
def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_correct_sample(case):
    num_samples, num_correct, k = case
    subsets = list(combinations(range(num_samples), k))
    share = np.mean([any(index < num_correct for index in subset) for subset in subsets])
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(share, abs=1e-12)


@given(st.integers(1, 3000), st.data())
def test_pass_at_k_stays_a_chance_for_any_number_of_samples(num_samples, data):
    num_correct = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    found = pass_at_k(num_samples, num_correct, k)
    assert 0.0 <= found <= 1.0
    assert found >= num_correct / num_samples - 1e-12
    if k < num_samples:
        assert found <= pass_at_k(num_samples, num_correct, k + 1) + 1e-12


@pytest.mark.parametrize("case", [(4, 1, 5), (4, 1, 0), (4, 5, 1), (0, 0, 1)])
def test_what_no_samples_can_tell_is_refused(case):
    with pytest.raises(ValueError, match="pass@k needs 1 <= k <= samples"):
        pass_at_k(*case)


def test_an_interval_is_as_wide_as_that_of_a_normal_mean():
    values = np.random.default_rng(0).random((2000, 2))
    low, high = bootstrap_intervals(values, seed=1)
    width = 2 * 1.96 * values.std(0) / np.sqrt(len(values))
    np.testing.assert_allclose(high - low, width, rtol=0.1)
    assert (low < values.mean(0)).all() and (values.mean(0) < high).all()


def test_an_interval_covers_the_truth_as_often_as_it_says():
    random = np.random.default_rng(5)
    covered = 0
    for number in range(200):
        values = (random.random((60, 1)) < 0.4).astype(float)
        low, high = bootstrap_intervals(values, seed=number)
        covered += bool(low[0] <= 0.4 <= high[0])
    assert 180 <= covered <= 199


def test_the_same_seed_gives_the_same_interval_and_no_question_none():
    values = np.random.default_rng(0).random((50, 1))
    first, again, other = (bootstrap_intervals(values, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert np.isnan(bootstrap_intervals(np.empty((0, 1)), seed=0)).all()
    assert bootstrap_intervals(np.ones((9, 1)), seed=0) == (1.0, 1.0)
