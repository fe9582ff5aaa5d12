"""Fetches the next bucket of weights while the engine stages the one before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from async_grpo.types import WeightsBucket, WeightsDelta

Wanted = WeightsBucket | WeightsDelta
Fetch = Callable[[Wanted], Awaitable[NDArray[np.uint8]]]
Fetched = AsyncIterator[tuple[Wanted, NDArray[np.uint8]]]


@asynccontextmanager
async def fetch_ahead(buckets: Sequence[Wanted], fetch: Fetch) -> AsyncIterator[Fetched]:
    """The buckets in order, each with its [size_bytes] bytes; at most two are held at a time.

    A fetch's error is raised where its bucket is taken. Whoever leaves early ends the fetch that
    is under way.
    """
    under_way: list[asyncio.Future[NDArray[np.uint8]]] = []

    async def in_order() -> Fetched:
        under_way.extend(asyncio.ensure_future(fetch(bucket)) for bucket in buckets[:1])
        for bucket, following in zip_longest(buckets, buckets[1:]):
            data = await under_way.pop()
            if following is not None:
                under_way.append(asyncio.ensure_future(fetch(following)))
            yield bucket, data

    try:
        yield in_order()
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
