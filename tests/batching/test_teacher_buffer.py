"""What waits of teachers' payloads is bounded, and nobody waits for ever."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from effort import histories
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import run

from async_grpo.batching import teachers
from async_grpo.batching.teachers import PayloadBuffer

NUM_STEPS, FIRST = 4, 3
PAYLOADS = st.lists(
    st.tuples(
        st.integers(0, NUM_STEPS - 1),
        st.integers(0, 60),
        st.floats(0, 5),  # until it is made, and until it is fetched
        st.floats(0, 5),
    ),
    max_size=30,
)


async def trained(buffer, payloads, is_due):
    """Make payloads of (step, bytes, ...), and fetch them once their step trains.

    `is_due` hears of each that gets room: its bytes and step, and what else is held by step.
    """
    held = Counter()
    trains = [asyncio.Event() for _ in range(NUM_STEPS)]

    async def payload(step, num_bytes, made_s, fetched_s):
        await asyncio.sleep(made_s)
        await buffer.hold(num_bytes, step=FIRST + step)
        is_due(num_bytes, FIRST + step, Counter(held))
        held[FIRST + step] += num_bytes
        assert buffer.num_bytes == held.total()
        await trains[step].wait()
        await asyncio.sleep(fetched_s)
        held[FIRST + step] -= num_bytes
        await buffer.release(num_bytes, step=FIRST + step)

    tasks = [(one[0], asyncio.ensure_future(payload(*one))) for one in payloads]
    for step in range(NUM_STEPS):
        trains[step].set()
        await asyncio.gather(*(task for own, task in tasks if own == step))
        await buffer.step_ended()
    assert buffer.step == FIRST + NUM_STEPS
    return buffer.num_bytes


def of_half(held, step, *, now):
    """Bytes of the steps that share their room with `step`."""
    return sum(amount for other, amount in held.items() if (other <= now) == (step <= now))


@settings(max_examples=histories(100), deadline=None)
@given(PAYLOADS, st.integers(0, 150))
def test_each_half_holds_its_share_or_one_payload_and_every_step_comes_to_its_end(payloads, limit):
    buffer = PayloadBuffer(limit, questions_per_step=1, step=FIRST)

    def is_due(num_bytes, step, held):
        others = of_half(held, step, now=buffer.step)
        assert 0 in (others, num_bytes) or others + num_bytes <= limit // 2

    assert run(trained(buffer, payloads, is_due)) == 0


@settings(max_examples=histories(100), deadline=None)
@given(PAYLOADS, st.integers(0, 150))
def test_a_step_that_goes_out_whole_has_room_for_all_of_it(payloads, limit):
    buffer = PayloadBuffer(limit, questions_per_step=1, step=FIRST, is_whole_step=True)

    async def scenario():
        own = [buffer.hold(num_bytes, step=FIRST) for step, num_bytes, *_ in payloads if not step]
        await asyncio.wait_for(asyncio.gather(*own), 1.0)
        later = [num_bytes for step, num_bytes, *_ in payloads if step]
        tasks = [asyncio.ensure_future(buffer.hold(n, step=FIRST + 1)) for n in later]
        await asyncio.sleep(1.0)
        held = [n for n, task in zip(later, tasks, strict=True) if task.done()]
        assert sum(held) <= limit // 2 or sum(map(bool, held)) <= 1
        for task in tasks:
            task.cancel()

    run(scenario())


def test_whoever_waits_for_room_has_it_once_something_is_released_or_its_step_trains():
    async def scenario():
        buffer = PayloadBuffer(20, questions_per_step=1)
        await buffer.hold(10, step=1)
        waiting = [asyncio.ensure_future(buffer.hold(4, step=step)) for step in (1, 2)]
        await asyncio.sleep(1.0)
        assert [task.done() for task in waiting] == [False, False]
        await buffer.release(6, step=1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [task.done() for task in waiting] == [True, False]
        await buffer.step_ended()  # 8 bytes of step 1 now share no room with step 2
        await asyncio.wait_for(waiting[1], 1.0)
        return buffer.num_bytes

    assert run(scenario()) == 12


def test_what_needs_no_room_never_waits_for_any():
    """Payloads that are made again have theirs: the rank that waits for them would free it."""

    async def scenario():
        buffer = PayloadBuffer(10, questions_per_step=1)
        await buffer.hold(99, step=0)  # more than there is, alone
        await asyncio.wait_for(buffer.hold(0, step=0), 1.0)
        await asyncio.wait_for(buffer.hold(0, step=1), 1.0)
        return buffer.num_bytes

    assert run(scenario()) == 99


def test_a_wait_that_is_given_up_holds_nothing():
    async def scenario():
        buffer = PayloadBuffer(10, questions_per_step=1)
        await buffer.hold(5, step=0)
        waiting = asyncio.ensure_future(buffer.hold(5, step=0))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await buffer.release(5, step=0)
        await asyncio.wait_for(buffer.hold(5, step=0), 1.0)
        return buffer.num_bytes

    assert run(scenario()) == 5


def test_the_seconds_of_all_that_wait_are_told_once(monkeypatch):
    async def scenario():
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(teachers, "time", SimpleNamespace(monotonic=loop.time))
        buffer = PayloadBuffer(10, questions_per_step=1)
        await buffer.hold(5, step=0)
        waiting = [asyncio.ensure_future(buffer.hold(n, step=0)) for n in (2, 3)]
        await asyncio.sleep(7.0)
        await buffer.release(5, step=0)
        await asyncio.gather(*waiting)
        return buffer.take_seconds_waiting(), buffer.take_seconds_waiting()

    assert run(scenario()) == (pytest.approx(14.0), 0.0)
