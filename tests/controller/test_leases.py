import asyncio
import itertools

import pytest

from async_grpo.controller.leases import LeaseRequest, WaitingLine
from async_grpo.types import WeightsVersion
from async_grpo.util.errors import WorkerError

OLD, NEW = WeightsVersion(0, 1), WeightsVersion(0, 2)


class Room:
    """Gives `free` leases, to who is content with `served` or older weights."""

    def __init__(self, free=0, *, served=NEW):
        self.free, self.served = free, served
        self.asked = []
        self.line = WaitingLine(try_acquire=self.try_acquire, release=lambda lease: None)

    def serve(self, *, free):
        self.free = free
        self.line.serve()

    def try_acquire(self, wanted):
        self.asked.append(wanted.version)
        if not self.free or wanted.version > self.served:
            return None
        self.free -= 1
        return f"for {wanted.cost:g}"


def wait(room, cost, version, *, timeout_s=5.0, moves=int):
    return room.line.wait(LeaseRequest(cost, version), timeout_s=timeout_s, moves=moves)


async def wait_in(room, *requests):
    waiters = [asyncio.create_task(wait(room, *request)) for request in requests]
    await asyncio.sleep(0)
    return waiters


async def served(waiters):
    await asyncio.sleep(0.01)
    return [waiter.done() for waiter in waiters]


def test_leases_go_out_in_the_order_of_asking():
    async def scenario():
        room = Room()
        waiters = await wait_in(room, (1.0, OLD), (2.0, OLD), (3.0, OLD))
        room.serve(free=2)
        assert await served(waiters) == [True, True, False]
        assert [await waiter for waiter in waiters[:2]] == ["for 1", "for 2"]
        room.serve(free=1)
        assert await served(waiters) == [True, True, True]

    asyncio.run(scenario())


def test_who_waits_for_newer_weights_lets_others_pass():
    async def scenario():
        room = Room(served=OLD)
        waiters = await wait_in(room, (1.0, NEW), (1.0, OLD))
        room.serve(free=2)
        assert await served(waiters) == [False, True]

    asyncio.run(scenario())


def test_one_refusal_speaks_for_all_of_a_version():
    async def scenario():
        full = Room()
        waiters = await wait_in(full, *[(1.0, OLD)] * 100, (1.0, NEW))
        full.serve(free=0)
        assert full.asked == [OLD, NEW]
        full.line.cancel(WorkerError("over"))
        await asyncio.gather(*waiters, return_exceptions=True)

    asyncio.run(scenario())


def test_a_lease_is_never_given_to_who_has_left():
    async def scenario():
        room = Room()
        with pytest.raises(TimeoutError):
            await wait(room, 1.0, OLD, timeout_s=0.01)
        room.serve(free=1)
        assert (room.free, room.asked) == (1, [])

    asyncio.run(scenario())


def test_who_waits_while_anything_moves_keeps_its_place():
    async def scenario():
        room, num_tokens = Room(), itertools.count()
        waiting = asyncio.create_task(
            wait(room, 1.0, OLD, timeout_s=0.01, moves=lambda: next(num_tokens))
        )
        await asyncio.sleep(0.05)
        later = asyncio.create_task(wait(room, 2.0, OLD))
        await asyncio.sleep(0.05)
        room.serve(free=1)
        assert await waiting == "for 1"
        later.cancel()

    asyncio.run(scenario())


def test_the_end_of_a_run_ends_all_waiting():
    async def scenario():
        room = Room()
        (waiter,) = await wait_in(room, (1.0, OLD))
        room.line.cancel(WorkerError("the run has ended"))
        with pytest.raises(WorkerError, match="the run has ended"):
            await waiter

    asyncio.run(scenario())
