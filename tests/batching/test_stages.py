import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.batching.statistics import STAGES, StageClock

changes = st.lists(
    st.tuples(st.sampled_from(STAGES), st.integers(1, 8), st.integers(0, 9), st.integers(0, 9)),
    max_size=12,
)


@given(changes)
def test_idle_and_sample_seconds_are_those_of_every_moment(changes):
    """Against a count of each whole second: a change (stage, n, start, length) holds n samples."""
    events = [(start, stage, n) for stage, n, start, _ in changes]
    events += [(start + length, stage, -n) for stage, n, start, length in changes]
    clock = StageClock(0.0)
    for now_s, stage, n in sorted(events, key=lambda event: event[0]):
        clock.add(stage, n, now_s=float(now_s))
    sums = clock.take(20.0)
    assert sums["pipeline_seconds"] == 20.0
    for stage in STAGES:
        held = [
            sum(n for s, n, start, length in changes if s == stage and start <= t < start + length)
            for t in range(20)
        ]
        assert sums[f"{stage}_seconds"] == sum(held)
        assert sums[f"{stage}_idle_seconds"] == held.count(0)


def test_what_was_taken_is_not_counted_again():
    clock = StageClock(0.0)
    clock.add("generating", 4, now_s=0.0)
    clock.take(5.0)
    sums = clock.take(6.0)
    assert (sums["pipeline_seconds"], sums["generating_seconds"]) == pytest.approx((1.0, 4.0))
