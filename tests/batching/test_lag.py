import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import make_completion

from async_grpo.batching.lag import StalenessError, covers_output, tokens_by_lag
from async_grpo.types import Episode, VersionSpan, WeightsVersion


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


@pytest.mark.parametrize(
    "spans",
    [
        completion((0, 1, 4)),
        completion((0, 0, 2), (1, 3, 4)),
        completion((0, 0, 3), (1, 2, 4)),
        completion((0, 0, 3), num_tokens=4),
        completion((0, 0, 5), num_tokens=4),
        completion((0, 0, 4), (1, 4, 2), (1, 2, 4)),
    ],
)
def test_every_token_has_exactly_one_version(spans):
    assert not covers_output(spans.turns[0])
    with pytest.raises(StalenessError, match="every sampled token must have one version"):
        tokens_by_lag(spans, batch=1, max_staleness=1)
