"""Weights wait for what ends soon, for nothing else, and never for long."""

import asyncio

import pytest

from async_grpo.rollout import weights_update
from async_grpo.rollout.weights_update import UpdateDelay

MAX_NUM_SEQS = 8


class Clock:
    """Stands still but for sleeps; sequences end at their times."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        self.ends = []
        self.num_looks = 0
        monkeypatch.setattr(weights_update.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(weights_update.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds):
        self.now += seconds
        self.num_looks += 1

    def num_unfinished(self):
        return sum(end > self.now for end in self.ends)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def delay(clock):
    """Ten seconds after an update; requests take eight."""
    delay = UpdateDelay(max_num_seqs=MAX_NUM_SEQS)
    clock.now -= 20.0
    delay.updated()
    for _ in range(3):
        began_at = clock.now
        clock.now += 8.0
        delay.ended(began_at=began_at)
        clock.now -= 8.0
    clock.now += 10.0
    delay.updated()
    clock.now += 10.0
    return delay


def waited(clock, delay, *, began, ends):
    """Seconds; by when requests began, and their sequences will end, from now."""
    clock.ends = [clock.now + end for end in ends]
    before = clock.now
    asyncio.run(delay.wait([clock.now + at for at in began], clock.num_unfinished))
    return clock.now - before


def test_weights_wait_until_half_of_the_sequences_have_ended(clock, delay):
    seconds = waited(clock, delay, began=[-7, -7, -7], ends=[0.5, 1, 1.5, 2, 3, 4])
    assert seconds == pytest.approx(1.5, abs=0.03)


def test_the_wait_is_bounded_by_the_time_since_the_last_update(clock, delay):
    assert waited(clock, delay, began=[-7], ends=[60] * 4) == pytest.approx(5.0, abs=0.03)


def test_the_wait_is_bounded_absolutely(clock, delay):
    clock.now += 1000.0
    assert waited(clock, delay, began=[-7], ends=[600] * 4) == pytest.approx(20.0, abs=0.03)


def test_sequences_that_have_just_begun_are_not_waited_for(clock, delay):
    """They take eight seconds, five may be waited."""
    assert waited(clock, delay, began=[-7, -2, -2], ends=[1] * 6) == 0.0
    assert waited(clock, delay, began=[-7, -4, -2], ends=[1] * 6) > 0.0


def test_a_line_of_others_means_that_nothing_is_gained(clock, delay):
    assert waited(clock, delay, began=[-7] * 3, ends=[1] * (MAX_NUM_SEQS + 1)) == 0.0


def test_an_engine_that_stands_still_is_not_waited_for(clock, delay):
    assert waited(clock, delay, began=[], ends=[]) == 0.0


def test_what_an_update_interrupted_says_nothing_of_how_long_requests_take(clock):
    delay = UpdateDelay(max_num_seqs=MAX_NUM_SEQS)
    began_at, clock.now = clock.now, clock.now + 5.0
    delay.updated()
    clock.now += 5.0
    delay.ended(began_at=began_at)
    assert waited(clock, delay, began=[-9.9], ends=[1]) == 0.0


def test_the_first_update_does_not_wait(clock):
    delay = UpdateDelay(max_num_seqs=MAX_NUM_SEQS)
    began_at, clock.now = clock.now, clock.now + 5.0
    delay.ended(began_at=began_at)
    assert waited(clock, delay, began=[-4.9], ends=[1]) == 0.0
