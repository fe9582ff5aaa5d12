"""Of episodes with a long tail all are trained here; a rule that drops by age loses the long ones.

The benchmark's own figures: the real batcher on a clock that jumps.
"""

import itertools

import pytest

from benchmarks.episodes import GROUP, LONG, MEDIAN_TURNS, Size, by_admission, by_age


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_what_is_trained_is_what_was_admitted_whatever_its_length(staleness):
    size = Size(tail=30.0, staleness=staleness, num_batches=4, batch_size=4)
    outcome = by_admission(size)
    num_episodes = 4 * 4 * GROUP
    assert not outcome.lost
    assert sorted(outcome.trained) == sorted(itertools.islice(size.turns(), num_episodes))
    assert max(outcome.trained) > 20 * MEDIAN_TURNS
    assert outcome.max_lag <= staleness


def test_a_rule_that_drops_by_age_loses_the_long_ones_of_the_same_episodes():
    size = Size(tail=30.0, staleness=1, num_batches=12, batch_size=4)
    outcome = by_age(size)
    assert min(outcome.lost) > MEDIAN_TURNS
    assert outcome.lost_long > 0.9
    assert max(outcome.trained) < LONG * MEDIAN_TURNS


def test_a_rule_that_drops_by_age_loses_nothing_where_all_are_alike():
    assert not by_age(Size(tail=1.0, staleness=1, num_batches=12, batch_size=4)).lost
