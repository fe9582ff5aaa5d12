"""When a generation worker answers its registry: an engine of fakes, in a clock that is real."""

import asyncio
import time

import pytest

from async_grpo.rollout import generation_worker as module
from async_grpo.rollout.generation_worker import GenerationWorker
from async_grpo.types import Pulse, RequestPulse, WeightsVersion

V0, V1 = WeightsVersion(1, 0), WeightsVersion(1, 1)
POLL_S = 0.01


class Engine:
    """Answers when it is not frozen; while it loads it answers nothing, as the real one."""

    def __init__(self):
        self.is_dead, self.serves = False, V0
        self.moves = asyncio.Event()
        self.moves.set()
        self.asked = 0
        self.is_working = False
        self.spent_s = 0.0
        self.sleeps = False

    async def sleep(self):
        self.sleeps = True

    def cpu_seconds(self):
        self.spent_s += self.is_working
        return self.spent_s

    async def pulse(self, decode):
        self.asked += 1
        await self.moves.wait()
        return Pulse(str(self.serves), 7, {3: RequestPulse(5, is_waiting=False)})


class Ended(BaseException):
    """The worker has ended its process."""


@pytest.fixture(autouse=True)
def no_real_end(monkeypatch):
    def end(reason):
        raise Ended(reason)

    monkeypatch.setattr(module, "end_process", end)
    monkeypatch.setattr(module, "ENGINE_POLL_INTERVAL_S", POLL_S)


def make_worker(engine):
    worker = object.__new__(GenerationWorker)  # the real __init__ starts vLLM
    worker._engine, worker._worker_id, worker._version = engine, "w", V0
    worker._loading, worker._answering = asyncio.Lock(), None
    worker._is_asleep = False

    async def alive(call):
        return await call

    worker._alive = alive
    return worker


def test_a_ping_is_answered_after_its_time_by_the_engine_itself():
    async def scenario():
        worker = make_worker(Engine())
        started = time.monotonic()
        assert await worker.ping(0.2) == Pulse("1.0", 7, {3: (5, False, None)})
        assert time.monotonic() - started >= 0.2
        assert (await worker.ping()).serves == "1.0"

    asyncio.run(scenario())


def test_a_frozen_engine_leaves_pings_unanswered_without_piling_up_questions():
    async def scenario():
        engine = Engine()
        worker = make_worker(engine)
        engine.moves.clear()
        pings = [asyncio.create_task(worker.ping()) for _ in range(5)]
        await asyncio.sleep(20 * POLL_S)
        assert not any(ping.done() for ping in pings)
        assert engine.asked == 1
        engine.moves.set()
        assert [pulse.serves for pulse in await asyncio.gather(*pings)] == ["1.0"] * 5

    asyncio.run(scenario())


def test_a_ping_does_not_wait_for_a_load_that_begins_before_or_after_it():
    async def scenario():
        engine = Engine()
        worker = make_worker(engine)
        engine.moves.clear()
        engine.is_working = True
        before = asyncio.create_task(worker.ping())
        await asyncio.sleep(3 * POLL_S)
        assert not before.done()
        async with worker._loading:
            assert await asyncio.wait_for(before, 20) == Pulse("1.0")  # and nothing of requests
            assert await asyncio.wait_for(worker.ping(), 20) == Pulse("1.0")
            worker._version = engine.serves = V1
        engine.moves.set()
        assert (await asyncio.wait_for(worker.ping(), 20)).serves == "1.1"

    asyncio.run(scenario())


def test_an_answer_that_comes_while_weights_load_is_told_by_the_next_ping():
    """The cuts in it are told nowhere else."""

    async def scenario():
        engine = Engine()
        worker = make_worker(engine)
        engine.moves.clear()
        engine.is_working = True
        async with worker._loading:
            assert (await asyncio.wait_for(worker.ping(), 20)).requests is None
            engine.moves.set()
            await asyncio.sleep(3 * POLL_S)
        assert (await worker.ping()).requests == {3: (5, False, None)}
        assert engine.asked == 1
        await worker.ping()
        assert engine.asked == 2

    asyncio.run(scenario())


def test_an_answer_for_several_pings_is_over_once_and_the_next_one_is_asked_for_once():
    async def scenario():
        engine = Engine()
        worker = make_worker(engine)
        engine.moves.clear()

        async def pinged_twice():
            await worker.ping()
            engine.moves.clear()
            await worker.ping()

        twice = asyncio.create_task(pinged_twice())
        once = asyncio.create_task(worker.ping())
        await asyncio.sleep(3 * POLL_S)
        engine.moves.set()
        await asyncio.wait_for(once, 20)
        assert not twice.done() and engine.asked == 2
        further = asyncio.create_task(worker.ping())
        await asyncio.sleep(3 * POLL_S)
        assert engine.asked == 2
        engine.moves.set()
        await asyncio.wait_for(asyncio.gather(twice, further), 20)

    asyncio.run(scenario())


def test_an_engine_sleeps_after_it_has_answered_and_is_asked_no_more():
    async def scenario():
        engine = Engine()
        worker = make_worker(engine)
        engine.moves.clear()
        ping = asyncio.create_task(worker.ping())
        await asyncio.sleep(3 * POLL_S)
        sleeping = asyncio.create_task(worker.sleep())
        await asyncio.sleep(3 * POLL_S)
        assert await worker.ping() == Pulse("1.0") and not engine.sleeps
        engine.moves.set()
        await asyncio.wait_for(sleeping, 20)
        assert engine.sleeps and (await ping).requests is not None
        assert engine.asked == 1

    asyncio.run(scenario())


def test_an_engine_that_freezes_while_it_loads_leaves_pings_unanswered():
    async def scenario():
        engine = Engine()
        worker = make_worker(engine)
        engine.moves.clear()
        async with worker._loading:
            ping = asyncio.create_task(worker.ping())
            await asyncio.sleep(20 * POLL_S)
            assert not ping.done()
            engine.is_working = True
            assert (await asyncio.wait_for(ping, 20)).serves == "1.0"

    asyncio.run(scenario())


def test_a_worker_whose_idle_engine_has_died_ends_before_the_ping_is_due():
    async def scenario():
        engine = Engine()
        ping = asyncio.create_task(make_worker(engine).ping(1000.0))
        await asyncio.sleep(3 * POLL_S)
        engine.is_dead = True
        with pytest.raises(Ended, match="worker w ends: its engine has died"):
            await asyncio.wait_for(ping, 20)

    asyncio.run(scenario())
