import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import run

from async_grpo.batching.rounds import Outbox
from async_grpo.util.errors import WorkerError


def numbered(index, num_ranks):
    return tuple(f"item {index} of rank {rank}" for rank in range(num_ranks))


async def take_all(outbox, rank, num_items, seconds):
    """A rank as the trainer has them: it asks for the next item while it computes this one."""
    taken, asked = [], asyncio.ensure_future(outbox.take(rank, 0))
    for index in range(num_items):
        taken.append(await asked)
        asked = asyncio.ensure_future(outbox.take(rank, index + 1))
        await asyncio.sleep(seconds[index])
    asked.cancel()
    return taken


async def put_on_demand(outbox, num_ranks, num_items):
    for index in range(num_items):
        await outbox.wait_for_demand()
        outbox.put(numbered(index, num_ranks))


@given(st.data())
def test_every_rank_takes_every_item_of_its_own_and_nothing_is_kept(data):
    num_ranks, num_items = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    pace = st.lists(st.floats(0, 5), min_size=num_items, max_size=num_items)
    paces = [data.draw(pace) for _ in range(num_ranks)]

    async def scenario():
        outbox = Outbox(num_ranks)
        ranks = (take_all(outbox, rank, num_items, paces[rank]) for rank in range(num_ranks))
        taken = await asyncio.gather(*ranks, put_on_demand(outbox, num_ranks, num_items))
        return taken[:-1], len(outbox._answers)

    taken, num_kept = run(scenario())
    for rank, items in enumerate(taken):
        assert items == [numbered(index, num_ranks)[rank] for index in range(num_items)]
    assert num_kept <= 2  # the one that is computed, and the one before it


def test_asking_again_gives_the_same_item():
    async def scenario():
        outbox = Outbox(1)
        first = asyncio.ensure_future(outbox.take(0, 0))
        await put_on_demand(outbox, 1, 1)
        return await first, await outbox.take(0, 0)

    assert run(scenario()) == ("item 0 of rank 0",) * 2


def test_an_item_is_wanted_when_every_rank_has_asked_for_it():
    async def scenario():
        outbox = Outbox(2)
        seen = [outbox.is_wanted]
        waiting = []
        for rank in (1, 0):
            waiting.append(asyncio.ensure_future(outbox.take(rank, 0)))
            await asyncio.sleep(0)
            seen.append(outbox.is_wanted)
        outbox.put(numbered(0, 2))
        seen.append(outbox.is_wanted)
        await asyncio.gather(*waiting)
        return seen

    assert run(scenario()) == [False, False, True, False]


def test_waiting_for_demand_ends_with_the_demand():
    async def scenario():
        outbox, clock = Outbox(1), asyncio.get_running_loop().time

        async def wait():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(3.0):
                    await outbox.wait_for_demand()
            return clock()

        waited = [await wait()]
        asking = asyncio.ensure_future(outbox.take(0, 0))
        waited.append(await wait())
        outbox.put(numbered(0, 1))
        waited.append(await wait())
        await asking
        return waited

    assert run(scenario()) == pytest.approx([3.0, 3.0, 6.0])


def test_hunger_counts_for_the_item_that_is_formed_next():
    async def scenario():
        outbox = Outbox(2)
        outbox.mark_hungry(0)
        seen = [outbox.is_hungry]
        outbox.put(numbered(0, 2))
        seen.append(outbox.is_hungry)
        outbox.mark_hungry(0)  # it came too late
        seen.append(outbox.is_hungry)
        outbox.mark_hungry(1)
        seen.append(outbox.is_hungry)
        return seen

    assert run(scenario()) == [True, False, False, True]


def test_the_first_failure_reaches_every_rank_that_waits_or_comes_later():
    async def scenario():
        outbox = Outbox(3)
        waiting = [asyncio.ensure_future(outbox.take(rank, 0)) for rank in (0, 1)]
        await asyncio.sleep(0)
        outbox.fail(WorkerError("the first"))
        outbox.fail(WorkerError("the second"))
        return await asyncio.gather(*waiting, outbox.take(2, 0), return_exceptions=True)

    outcomes = run(scenario())
    assert [(type(outcome), str(outcome)) for outcome in outcomes] == [
        (WorkerError, "the first")
    ] * 3
