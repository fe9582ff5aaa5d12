"""The hand-over from the trainer's calls to a load."""

import asyncio

import pytest

from async_grpo.errors import WeightSyncError
from async_grpo.rollout.feed import UpdateFeed


async def load(feed, loaded, *, prepare=0.0):
    await asyncio.sleep(prepare)
    async for update in feed:
        await asyncio.sleep(0.01)
        loaded.append(update["n"])
    return "ack"


def test_whoever_puts_an_update_waits_until_it_is_loaded():
    async def run():
        feed, loaded = UpdateFeed(), []
        task = asyncio.create_task(load(feed, loaded))
        await feed.until_wanted(task)
        for n in range(5):
            await feed.put({"n": n})
            assert loaded == list(range(n + 1))
        feed.close()
        return await task

    assert asyncio.run(run()) == "ack"


def test_nothing_is_wanted_before_the_load_is_ready():
    async def run():
        feed = UpdateFeed()
        task = asyncio.create_task(load(feed, [], prepare=0.1))
        waiting = asyncio.create_task(feed.until_wanted(task))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await asyncio.wait_for(waiting, 1)
        feed.close()
        await task

    asyncio.run(run())


def test_a_load_that_is_refused_is_told_to_whoever_began_it():
    async def refuse():
        raise WeightSyncError("another model")

    async def run():
        task = asyncio.create_task(refuse())
        await asyncio.wait_for(UpdateFeed().until_wanted(task), 1)

    with pytest.raises(WeightSyncError, match="another model"):
        asyncio.run(run())
