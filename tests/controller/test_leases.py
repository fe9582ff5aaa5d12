import asyncio
import itertools

import pytest

from async_grpo.controller.leases import WaitingLine
from async_grpo.errors import WorkerError
from async_grpo.types import WeightsVersion

OLD, NEW = WeightsVersion(0, 1), WeightsVersion(0, 2)


class Room:
    """Gives `free` leases, to who is content with `served` or older weights."""

    def __init__(self, free, *, served=NEW):
        self.free, self.served = free, served
        self.asked = []

    def try_acquire(self, cost, version, prefer):
        self.asked.append(version)
        if not self.free or version > self.served:
            return None
        self.free -= 1
        return f"for {cost:g}"


def wait(line, cost, version, *, timeout_s=5.0, moves=int):
    return line.wait(
        cost, version, None, timeout_s=timeout_s, moves=moves, release=lambda lease: None
    )


async def wait_in(line, *requests):
    waiters = [asyncio.create_task(wait(line, *request)) for request in requests]
    await asyncio.sleep(0)
    return waiters


async def served(waiters):
    await asyncio.sleep(0.01)
    return [waiter.done() for waiter in waiters]


def test_leases_go_out_in_the_order_of_asking():
    async def scenario():
        line = WaitingLine()
        waiters = await wait_in(line, (1.0, OLD), (2.0, OLD), (3.0, OLD))
        line.serve(Room(free=2).try_acquire)
        assert await served(waiters) == [True, True, False]
        assert [await waiter for waiter in waiters[:2]] == ["for 1", "for 2"]
        line.serve(Room(free=1).try_acquire)
        assert await served(waiters) == [True, True, True]

    asyncio.run(scenario())


def test_who_waits_for_newer_weights_lets_others_pass():
    async def scenario():
        line = WaitingLine()
        waiters = await wait_in(line, (1.0, NEW), (1.0, OLD))
        line.serve(Room(free=2, served=OLD).try_acquire)
        assert await served(waiters) == [False, True]

    asyncio.run(scenario())


def test_one_refusal_speaks_for_all_of_a_version():
    async def scenario():
        line, full = WaitingLine(), Room(free=0)
        waiters = await wait_in(line, *[(1.0, OLD)] * 100, (1.0, NEW))
        line.serve(full.try_acquire)
        assert full.asked == [OLD, NEW]
        line.cancel(WorkerError("over"))
        await asyncio.gather(*waiters, return_exceptions=True)

    asyncio.run(scenario())


def test_a_lease_is_never_given_to_who_has_left():
    async def scenario():
        line, room = WaitingLine(), Room(free=1)
        with pytest.raises(TimeoutError):
            await wait(line, 1.0, OLD, timeout_s=0.01)
        line.serve(room.try_acquire)
        assert (room.free, room.asked) == (1, [])

    asyncio.run(scenario())


def test_who_waits_while_anything_moves_keeps_its_place():
    async def scenario():
        line, num_tokens = WaitingLine(), itertools.count()
        waiting = asyncio.create_task(
            wait(line, 1.0, OLD, timeout_s=0.01, moves=lambda: next(num_tokens))
        )
        await asyncio.sleep(0.05)
        later = asyncio.create_task(wait(line, 2.0, OLD))
        await asyncio.sleep(0.05)
        line.serve(Room(free=1).try_acquire)
        assert await waiting == "for 1"
        later.cancel()

    asyncio.run(scenario())


def test_the_end_of_a_run_ends_all_waiting():
    async def scenario():
        line = WaitingLine()
        (waiter,) = await wait_in(line, (1.0, OLD))
        line.cancel(WorkerError("the run has ended"))
        with pytest.raises(WorkerError, match="the run has ended"):
            await waiter

    asyncio.run(scenario())
