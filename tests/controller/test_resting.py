"""Workers that give their devices to the trainer, under a real registry in a clock that jumps."""

import asyncio

import pytest
from faulty_workers import V0, V1
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import run
from test_worker_faults import INTERVAL_S, LEASE_S, call, two_workers

from async_grpo.util import deadlines
from async_grpo.util.errors import LossCause, NoWorkerError, WorkerError


def test_a_worker_gets_no_lease_from_its_rest_to_the_next_weights():
    async def scenario():
        scene, first, second = await two_workers()
        held = await scene.lease(prefer="first")
        await scene.registry.rest()
        assert first.is_asleep and second.is_asleep
        assert (await held.ended).cause == LossCause.SLEEP
        with pytest.raises(NoWorkerError):
            await scene.lease(V0)
        waiting = asyncio.create_task(scene.lease(V0, timeout_s=100.0))
        await asyncio.sleep(20)
        assert not waiting.done()
        report = await scene.publish(V1)
        assert len(report.acks) == 2
        assert (await waiting).is_valid
        assert await call(scene, "second", version=V1) == V1
        assert scene.counts["slept"] == 2

    run(scenario())


def test_a_worker_that_dies_asleep_is_counted_and_its_successor_sleeps_until_weights_come():
    async def scenario():
        scene, first, _ = await two_workers()
        await scene.registry.rest()
        first.die()
        await asyncio.sleep(INTERVAL_S + LEASE_S)
        assert scene.names == ["second"]
        third = await scene.join("third")
        assert third.is_asleep
        with pytest.raises(NoWorkerError):
            await scene.lease(V0)
        await scene.publish(V1)
        assert await call(scene, "third", version=V1) == V1
        assert (scene.counts["fenced: died"], scene.counts["slept"]) == (1, 3)

    run(scenario())


def test_a_worker_that_dies_while_it_wakes_is_fenced_and_the_others_serve():
    async def scenario():
        scene, first, _ = await two_workers()
        await scene.registry.rest()
        first.fault = ("fetch", "dies")
        report = await scene.publish(V1)
        assert [ack.worker_id for ack in report.acks] == ["second"]
        assert "worker first died" in report.failures["first"]
        assert scene.counts["fenced: died"] == 1
        assert await call(scene, "second", version=V1) == V1

    run(scenario())


def test_a_worker_that_does_not_sleep_in_time_is_ended_so_that_its_devices_are_free():
    async def scenario():
        scene, first, second = await two_workers()
        first.fault = ("sleep", "stalls")
        await scene.registry.rest()
        assert second.is_asleep
        assert scene.killed == ["first"]
        within = f"did not answer within {deadlines.ENGINE_ASLEEP_S:g} s"
        assert within in scene.registry.history.exclusions["first"]
        assert scene.counts["fenced: sleep"] == 1

    run(scenario())


def test_a_worker_that_registers_while_weights_come_serves_these():
    async def scenario():
        scene, _, _ = await two_workers()
        await scene.registry.rest()
        joining = asyncio.create_task(scene.join("third", phase_s=1.0))
        await asyncio.sleep(0.1)  # it is falling asleep
        await scene.publish(V1)
        third = await joining
        assert not third.is_asleep
        assert await call(scene, "third", version=V1) == V1

    run(scenario())


def test_a_new_worker_whose_process_ends_asleep_is_its_dispatchers_to_start_again():
    async def scenario():
        scene, _, _ = await two_workers()
        await scene.registry.rest()
        joining = asyncio.create_task(scene.join("third", phase_s=1.0))
        await asyncio.sleep(0.1)
        scene.workers["third"].die()
        with pytest.raises(WorkerError, match="third died"):
            await joining

    run(scenario())


@given(st.lists(st.sampled_from(["rest", "publish", "join", "die", "work", "pass"]), max_size=12))
@settings(max_examples=60, deadline=None)
def test_in_any_history_no_lease_is_on_a_worker_that_sleeps(events):
    async def scenario():
        scene, _, _ = await two_workers()
        batches, under_way = 0, []
        for number, event in enumerate(events):
            if event == "rest":
                under_way.append(asyncio.create_task(scene.registry.rest()))
            elif event == "publish":
                batches += 1
                version = V0._replace(batches=batches)
                under_way.append(asyncio.create_task(scene.publish(version)))
            elif event == "join":
                under_way.append(asyncio.create_task(scene.join(f"w{number}")))
            elif event == "die" and scene.names:
                scene.workers[scene.names[0]].die()
            elif event == "work":
                under_way.append(asyncio.create_task(work(scene)))
            await asyncio.sleep({"pass": 20.0}.get(event, 0.05))
        done = await asyncio.gather(*under_way, return_exceptions=True)
        assert not [each for each in done if "that sleeps" in str(each)]  # said by a worker
        await scene.registry.rest()
        assert all(scene.workers[name].is_asleep for name in scene.names)

    run(scenario())


async def work(scene):
    async with scene.registry.lease(1.0, timeout_s=5.0) as worker:
        await worker.call("generate", 0.3)
