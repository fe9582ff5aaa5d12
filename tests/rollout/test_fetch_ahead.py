"""The next bucket travels while one is staged, and nobody waits for what nobody takes."""

import asyncio

import numpy as np
import pytest

from async_grpo.rollout.weights_update import fetch_ahead
from async_grpo.types import WeightsBucket
from async_grpo.util.errors import WeightSyncError

BUCKETS = tuple(WeightsBucket((), index, 1, 0) for index in range(4))


class Sender:
    """Its buckets arrive when `release` says so."""

    def __init__(self):
        self.asked, self.cancelled = [], []
        self.arrivals = {bucket.data: asyncio.Event() for bucket in BUCKETS}

    async def fetch(self, bucket):
        self.asked.append(bucket.data)
        try:
            await self.arrivals[bucket.data].wait()
        except asyncio.CancelledError:
            self.cancelled.append(bucket.data)
            raise
        if bucket.data == 3:
            raise WeightSyncError("a bucket of weights is lost")
        return np.array([bucket.data], np.uint8)


async def others():
    for _ in range(5):
        await asyncio.sleep(0)


def test_one_bucket_is_fetched_ahead_of_the_one_that_is_staged_and_no_more():
    async def scenario():
        sender, taken = Sender(), []
        async with fetch_ahead(BUCKETS[:3], sender.fetch) as fetched:
            for index in range(3):
                sender.arrivals[index].set()
                bucket, data = await anext(fetched)
                taken.append((bucket.data, int(data[0])))
                await others()  # while this one is staged
                assert sender.asked == list(range(min(index + 2, 3)))
            with pytest.raises(StopAsyncIteration):
                await anext(fetched)
        return taken, sender.cancelled

    assert asyncio.run(scenario()) == ([(0, 0), (1, 1), (2, 2)], [])


def test_a_bucket_that_is_lost_is_an_error_where_it_is_taken():
    async def scenario():
        sender, taken = Sender(), []
        for arrival in sender.arrivals.values():
            arrival.set()
        with pytest.raises(WeightSyncError, match="is lost"):
            async with fetch_ahead(BUCKETS, sender.fetch) as fetched:
                async for bucket, _ in fetched:
                    taken.append(bucket.data)
                    await others()
        return taken

    assert asyncio.run(scenario()) == [0, 1, 2]


def test_whoever_stops_at_a_bad_bucket_ends_the_fetch_that_is_under_way():
    async def scenario():
        sender = Sender()
        sender.arrivals[0].set()
        with pytest.raises(WeightSyncError, match="checksum"):
            async with fetch_ahead(BUCKETS, sender.fetch) as fetched:
                async for _ in fetched:
                    await others()
                    raise WeightSyncError("a bucket must have the checksum of its sender")
        return sender.asked, sender.cancelled

    assert asyncio.run(scenario()) == ([0, 1], [1])


def test_a_snapshot_without_buckets_fetches_nothing():
    async def scenario():
        async with fetch_ahead((), Sender().fetch) as fetched:
            return [each async for each in fetched]

    assert asyncio.run(scenario()) == []
