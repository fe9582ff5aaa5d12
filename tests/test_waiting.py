"""A wait looks at once, at its pace, and a last time when its time is over; a lost answer is asked
for again, but not for ever. Claimed for any.
"""

import asyncio
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.planning.clock import run
from async_grpo.util import waiting
from async_grpo.util.waiting import TRIES, ask_again, poll

SECONDS = st.integers(0, 40).map(lambda eighths: eighths / 8)  # binary, so that sums are exact


class Clock:
    """In place of `time`: it goes on by what is slept, and by what a look takes."""

    def __init__(self):
        self.now = 0.0
        self.slept = []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def looked(*, every_s, within_s, look_s=0.0, is_there_at=float("inf")):
    """Whether it was seen, when each look began and ended, and what was slept."""
    clock, began, ended = Clock(), [], []
    with patch.object(waiting, "time", clock):
        for _ in poll(every_s=every_s, within_s=within_s):
            began.append(clock.now)
            clock.now += look_s
            ended.append(clock.now)
            if began[-1] >= is_there_at:
                return True, began, ended, clock.slept
    return False, began, ended, clock.slept


@given(every_s=SECONDS.filter(bool), within_s=st.floats(-9, 40), look_s=SECONDS)
def test_what_never_comes_is_looked_for_to_the_end_and_no_longer(every_s, within_s, look_s):
    is_seen, began, ended, slept = looked(every_s=every_s, within_s=within_s, look_s=look_s)
    assert not is_seen
    assert began[0] == 0.0
    assert slept == [every_s] * (len(began) - 1)  # none before the first look or after the last
    assert all(end < within_s for end in ended[:-1])  # it goes on as long as there is time
    assert ended[-1] >= within_s  # no answer is given up early


@given(every_s=SECONDS.filter(bool), within_s=SECONDS, is_there_at=SECONDS)
def test_what_comes_in_time_is_seen_within_one_pause_of_its_coming(every_s, within_s, is_there_at):
    is_seen, began, _, slept = looked(every_s=every_s, within_s=within_s, is_there_at=is_there_at)
    assert is_seen or is_there_at > within_s
    if is_seen:
        assert is_there_at <= began[-1] < is_there_at + every_s or len(began) == 1
        assert len(slept) == len(began) - 1


class Lost(Exception):
    pass


class Final(Lost):
    pass


def asked(answers):
    """What comes of it, what was warned of, and after how many seconds each was asked."""
    answers, warned, at = iter(answers), [], []

    async def ask():
        at.append(asyncio.get_running_loop().time())
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    try:
        outcome = run(ask_again(ask, lost=Lost, final=Final, warn=warned.append, pause_s=2.5))
    except Exception as error:
        outcome = error
    return outcome, warned, [later - at[0] for later in at]


ANSWERS = st.lists(st.sampled_from([7, Lost("gone"), Final("away"), ValueError("other")]))


@given(ANSWERS.map(lambda some: [*some, *[Lost("gone")] * TRIES]))
def test_a_lost_answer_is_asked_for_again_until_the_last_try_and_nothing_else_is(answers):
    num_lost = next(n for n, answer in enumerate([*answers, 0]) if type(answer) is not Lost)
    num_tries = min(num_lost + 1, TRIES)
    outcome, warned, at = asked(answers)
    assert outcome is answers[num_tries - 1]
    assert at == [2.5 * number for number in range(num_tries)]
    assert warned == answers[: num_tries - 1]  # the last error is the caller's to tell of


def test_where_no_error_is_final_every_lost_answer_is_asked_for_again():
    async def ask():
        raise errors[len(warned)]

    errors, warned = [Final("away"), Lost("gone"), Final("again")], []
    with pytest.raises(Final, match="again"):
        asyncio.run(ask_again(ask, lost=Lost, warn=warned.append))
    assert warned == errors[:2]
