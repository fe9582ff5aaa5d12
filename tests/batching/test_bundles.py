"""Many calls of one actor as few: every call keeps its own answer, error and moment."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import Handle, run

from async_grpo.bundles import Bundles, CallTaker
from async_grpo.errors import DeadlineError, ProcessLostError, WorkerError


class Actor:
    """Answers after the time that it is told."""

    def __init__(self):
        self.num_calls = 0

    async def answer(self, seconds, value):
        self.num_calls += 1
        if seconds:
            await asyncio.sleep(seconds)
        if isinstance(value, Exception):
            raise value
        return value


class Counted(Handle):
    """Counts what a Ray cluster would be asked to carry."""

    def __init__(self, actor):
        super().__init__(actor)
        self.num_takes = 0

    def __getattr__(self, name):
        self.num_takes += name == "take_calls"
        return super().__getattr__(name)


def now():
    return asyncio.get_running_loop().time()


calls = st.tuples(
    st.sampled_from([0.0, 0.0, 0.5, 1.0, 7.0]), st.sampled_from([0.0, 0.25, 1.0, 30.0])
)


@given(st.lists(calls, min_size=1, max_size=30))
def test_every_call_is_answered_at_its_own_moment(asked):
    async def scenario():
        bundles = Bundles(Handle(Actor()))

        async def one(number, begin_s, seconds):
            await asyncio.sleep(begin_s)
            assert await bundles.call("answer", seconds, number) == number
            assert now() == pytest.approx(begin_s + seconds)

        await asyncio.gather(*(one(number, *call) for number, call in enumerate(asked)))

    run(scenario())


def test_calls_of_one_moment_and_their_answers_cost_one_call():
    async def scenario():
        handle = Counted(Actor())
        bundles = Bundles(handle)
        answers = [bundles.call("answer", 0.0, number) for number in range(100)]
        assert await asyncio.gather(*answers) == list(range(100))
        return handle.num_takes

    assert run(scenario()) == 1


def test_one_call_stands_open_however_many_wait():
    async def scenario():
        handle = Counted(Actor())
        bundles = Bundles(handle)
        waiting = [bundles.call("answer", 1000.0, number) for number in range(50)]
        for number in range(20):
            await asyncio.sleep(1.0)
            assert await bundles.call("answer", 0.0, number) == number
        assert handle.num_takes == 21
        await asyncio.gather(*waiting)
        return handle.num_takes

    assert run(scenario()) == 21


def test_an_error_is_that_of_its_call_alone():
    async def scenario():
        bundles = Bundles(Handle(Actor()))
        values = [DeadlineError("late"), 1, KeyError("a bug"), 2]
        return await asyncio.gather(
            *(bundles.call("answer", 0.0, value) for value in values), return_exceptions=True
        )

    late, one, bug, two = run(scenario())
    assert (type(late), str(late), one, two) == (DeadlineError, "late", 1, 2)
    assert (type(bug), str(bug)) == (WorkerError, "answer failed: KeyError: 'a bug'")


def test_a_call_that_is_given_up_disturbs_no_other():
    async def scenario():
        bundles = Bundles(Handle(Actor()))
        given_up = bundles.call("answer", 5.0, "given up")
        kept = bundles.call("answer", 5.0, "kept")  # the two answers come together
        await asyncio.sleep(1.0)
        given_up.cancel()
        assert await kept == "kept"
        assert await bundles.call("answer", 0.0, "next") == "next"
        return now()

    assert run(scenario()) == pytest.approx(5.0)


def test_calls_of_a_process_that_has_ended_are_lost_and_the_next_ones_are_not():
    async def scenario():
        actor = Actor()
        handle = Handle(actor)
        bundles = Bundles(handle)
        await bundles.call("answer", 0.0, "of the first process")
        lost = bundles.call("answer", 100.0, "lost")
        await asyncio.sleep(1.0)
        handle._taker = CallTaker(actor)  # another process has taken its place
        with pytest.raises(ProcessLostError):
            await bundles.call("answer", 0.0, "refused")
        with pytest.raises(ProcessLostError):
            await lost
        assert await bundles.call("answer", 0.0, "new") == "new"
        return actor.num_calls

    assert run(scenario()) == 3  # what is refused is not done


def test_a_client_that_waits_for_nothing_known_is_told():
    async def scenario():
        with pytest.raises(ProcessLostError, match="nobody here knows"):
            await CallTaker(Actor()).take("client", "", ())

    run(scenario())


def test_a_taker_remembers_no_client_that_has_all_its_answers():
    async def scenario():
        handle = Handle(Actor())
        for _ in range(10):
            bundles = Bundles(handle)
            await asyncio.gather(*(bundles.call("answer", float(i), i) for i in range(3)))
        await asyncio.sleep(1.0)
        return len(handle._taker._clients)

    assert run(scenario()) == 0
