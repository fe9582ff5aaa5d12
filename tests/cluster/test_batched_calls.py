"""Requests that share calls: each is begun once and gets its own answer, whatever comes between."""

import asyncio
import pickle
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError
from scripted import Handle, run

from async_grpo.cluster import handles
from async_grpo.cluster.batched_calls import NUM_UNDER_WAY, BatchedActor, BatchedCalls
from async_grpo.util.errors import (
    DeadlineError,
    LeaseLost,
    LossCause,
    ProcessLostError,
    WorkerError,
)


class Actor(BatchedActor):
    """Answers a number after a while."""

    def __init__(self):
        self.begun, self.ended = [], []

    async def twice(self, number, *, after_s=0.0):
        self.begun.append(number)
        try:
            await asyncio.sleep(after_s)
        finally:
            self.ended.append(number)
        return 2 * number

    async def lost(self):
        raise LeaseLost(LossCause.OWNER, "the owner's lease has ended")

    async def mistaken(self):
        raise ValueError("no such number")


class Wire:
    """Carries calls to an actor as Ray does: pickled, each in its time, until the actor dies."""

    def __init__(self, actor, delays_s=(0.0,)):
        self._actor, self._delays_s = actor, delays_s
        self.num_calls = self.num_open = self.most_open = 0
        self._died = None
        self.exchange = SimpleNamespace(remote=self._remote)

    async def _remote(self, *arguments):
        self._died = self._died or asyncio.get_running_loop().create_future()
        self.num_calls += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        call = asyncio.ensure_future(self._carried(arguments, self.num_calls))
        try:
            await asyncio.wait({call, self._died}, return_when=asyncio.FIRST_COMPLETED)
            if self._died.done():
                call.cancel()
                raise ActorDiedError
            return call.result()
        finally:
            self.num_open -= 1

    async def _carried(self, arguments, number):
        delay_s = self._delays_s[number % len(self._delays_s)]
        await asyncio.sleep(delay_s)
        answers = await self._actor.exchange(*copied(arguments))
        await asyncio.sleep(delay_s)
        return copied(answers)

    def die(self):
        self._died.set_result(None)


def copied(values):
    return pickle.loads(pickle.dumps(values))


def wired(delays_s=(0.0,)):
    actor = Actor()
    wire = Wire(actor, delays_s)
    return actor, wire, BatchedCalls(wire)


async def answer(reference, timeout_s=None):
    return await handles.work(reference, timeout_s=timeout_s, who="the actor")


TIMES_S = st.integers(0, 6).map(float)


@settings(max_examples=100)
@given(
    requests=st.lists(st.tuples(TIMES_S, TIMES_S, st.none() | TIMES_S), max_size=12),
    delays_s=st.lists(st.sampled_from((0.0, 0.5, 3.0)), min_size=1, max_size=4),
)
def test_each_request_is_begun_once_and_answered_unless_it_is_given_up(requests, delays_s):
    async def scenario():
        actor, wire, calls = wired(delays_s)

        async def ask(number, begins_s, takes_s, patience_s):
            await asyncio.sleep(begins_s)
            try:
                asked = calls.ask("twice", number, after_s=takes_s)
                return await answer(asked, timeout_s=patience_s)
            except DeadlineError:
                return None

        found = await asyncio.gather(*(ask(n, *each) for n, each in enumerate(requests)))
        await asyncio.sleep(100)
        for number, (*_, patience_s) in enumerate(requests):
            assert found[number] == 2 * number or (patience_s is not None and found[number] is None)
            assert number in actor.begun or found[number] is None
        assert sorted(actor.begun) == sorted(set(actor.begun)) == sorted(actor.ended)
        assert wire.most_open <= NUM_UNDER_WAY and not wire.num_open
        assert not any(of.answering or of.answers for of in actor._callers.values())

    run(scenario())


def test_what_cannot_be_sent_costs_no_request_that_is_under_way():
    async def scenario():
        _, _, calls = wired()
        first = calls.ask("twice", 4, after_s=2.0)
        await asyncio.sleep(1.0)
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            await calls.ask("twice", lambda: None)
        assert await answer(first) == 8
        assert await answer(calls.ask("twice", 5)) == 10

    run(scenario())


def test_a_lone_request_is_one_call_and_what_is_asked_at_once_shares_it():
    async def scenario():
        _, wire, calls = wired()
        assert await answer(calls.ask("twice", 4)) == 8
        assert wire.num_calls == 1
        asked = [calls.ask("twice", number) for number in range(64)]
        assert [await answer(each) for each in asked] == [2 * number for number in range(64)]
        assert wire.num_calls == 2

    run(scenario())


def test_a_slow_answer_delays_no_other():
    async def scenario():
        _, _, calls = wired()
        slow = calls.ask("twice", 1, after_s=1000.0)
        await asyncio.sleep(1.0)
        assert await answer(calls.ask("twice", 2, after_s=3.0), timeout_s=5.0) == 4
        assert await answer(slow) == 2

    run(scenario())


def test_who_gives_up_ends_the_work_of_the_actor_at_once():
    async def scenario():
        actor, _, calls = wired()
        with pytest.raises(DeadlineError, match="the actor did not answer within 2 s"):
            await answer(calls.ask("twice", 1, after_s=1000.0), timeout_s=2.0)
        await asyncio.sleep(0.1)
        assert actor.ended == [1]

    run(scenario())


def test_the_actors_end_fails_what_was_sent_and_sends_nothing_again():
    async def scenario():
        actor, wire, calls = wired(delays_s=(0.5,))
        asked = [asyncio.ensure_future(answer(calls.ask("twice", n, after_s=9.0))) for n in (1, 2)]
        await asyncio.sleep(1.0)
        wire.die()
        for each in asked:
            with pytest.raises(ProcessLostError, match="the actor died"):
                await each
        with pytest.raises(ProcessLostError, match="the actor died"):
            await answer(calls.ask("twice", 3))
        assert actor.begun == [1, 2]

    run(scenario())


def test_an_error_fails_its_request_alone_and_says_what_ray_would_say():
    async def scenario():
        _, wire, calls = wired()
        good = calls.ask("twice", 3)
        failing = [calls.ask("lost"), calls.ask("mistaken")]
        with pytest.raises(LeaseLost, match="owner's lease") as lost:
            await answer(failing[0])
        assert lost.value.cause is LossCause.OWNER
        with pytest.raises(WorkerError, match=r"the actor failed: ValueError: .*no such number"):
            await answer(failing[1])
        with pytest.raises(WorkerError, match=r"the actor failed: AttributeError"):
            await answer(calls.ask("unknown"))
        with pytest.raises(WorkerError, match=r"the actor failed: TypeError"):
            await answer(calls.ask("twice", 1, before_s=3))
        assert await answer(good) == 6
        assert wire.num_calls == 3

    run(scenario())


def test_an_actor_that_takes_no_batches_is_called_itself():
    async def scenario():
        calls = BatchedCalls(Handle(SimpleNamespace(twice=Actor().twice)))
        assert await answer(calls.ask("twice", 4)) == 8

    run(scenario())
