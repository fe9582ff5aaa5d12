"""All of several coroutines, or the first error and none of the others."""

import asyncio

import pytest

from async_grpo.util.waiting import together


def test_what_they_give_is_in_their_order():
    async def after(seconds, value):
        await asyncio.sleep(seconds)
        return value

    assert asyncio.run(together([after(0.02, 1), after(0.0, 2)], name="t")) == [1, 2]


def test_one_that_fails_ends_the_others():
    ended = []

    async def wait():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def fail():
        await asyncio.sleep(0)
        raise ValueError("away")

    async def scenario():
        with pytest.raises(ValueError, match="away"):
            await together([wait(), fail(), wait()], name="t")
        await asyncio.sleep(0)
        return len(ended)

    assert asyncio.run(scenario()) == 2
