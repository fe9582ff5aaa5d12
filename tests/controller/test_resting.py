"""Workers that give their devices to the trainer, under a real registry in a clock that jumps."""

import asyncio
from types import SimpleNamespace

import pytest
from faulty_workers import V0, V1, now_s
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import RayTaskError
from scripted import Handle, run
from test_worker_faults import INTERVAL_S, LEASE_S, call, two_workers

from async_grpo.gateway.run_gateway import Engines
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, LeaseLost, LossCause, NoWorkerError, WorkerError
from async_grpo.util.waiting import TRIES


async def two_asleep():
    scene, first, second = await two_workers()
    await scene.registry.rest()
    return scene, first, second


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
        scene, first, _ = await two_asleep()
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
        scene, first, _ = await two_asleep()
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


def test_a_worker_that_still_loads_when_a_rest_begins_gets_no_lease_for_these_weights():
    async def scenario():
        scene, _, second = await two_workers()
        second.phase_s = 3.0
        publishing = asyncio.create_task(scene.publish(V1))
        await asyncio.sleep(5)  # one serves already
        await scene.registry.rest()
        await publishing
        assert second.version == V1 and second.is_asleep
        with pytest.raises(NoWorkerError):
            await scene.lease(V0)

    run(scenario())


def test_a_worker_that_registers_while_weights_come_serves_these():
    async def scenario():
        scene, _, _ = await two_asleep()
        joining = asyncio.create_task(scene.join("third", phase_s=1.0))
        await asyncio.sleep(0.1)  # it is falling asleep
        await scene.publish(V1)
        third = await joining
        assert not third.is_asleep
        assert await call(scene, "third", version=V1) == V1

    run(scenario())


def test_a_new_worker_whose_process_ends_asleep_is_its_dispatchers_to_start_again():
    async def scenario():
        scene, _, _ = await two_asleep()
        joining = asyncio.create_task(scene.join("third", phase_s=1.0))
        await asyncio.sleep(0.1)
        scene.workers["third"].die()
        with pytest.raises(WorkerError, match="third died"):
            await joining

    run(scenario())


class Controller:
    """Of a run; it answers the gateway as the real one does."""

    def __init__(self, scene, *, stall_timeout_s):
        self._scene, self._stall_timeout_s = scene, stall_timeout_s

    async def ask(self, run, role, method, request, *, cost, prefer):
        limit_s = self._stall_timeout_s
        try:
            async with self._scene.registry.lease(cost, prefer=prefer, timeout_s=limit_s) as worker:
                return (await worker.call(method, request),)
        except AsyncGrpoError as error:
            raise RayTaskError("ask", "", error).as_instanceof_cause() from None


def engines_of(scene, *, stall_timeout_s=900.0):
    """As the gateway of a run asks them."""
    engines = Engines(1)
    controller = Handle(Controller(scene, stall_timeout_s=stall_timeout_s))
    engines._client = SimpleNamespace(controller=controller, run=None)
    return engines


def test_a_turn_of_the_gateway_waits_for_the_wake_and_one_that_a_rest_cuts_is_sampled_again():
    async def scenario():
        scene, _, _ = await two_workers()
        engines = engines_of(scene)
        cut = asyncio.create_task(engines.turn(30.0, prefer=None))
        await asyncio.sleep(10)
        await scene.registry.rest()
        late = asyncio.create_task(engines.turn(5.0, prefer="first"))
        await asyncio.sleep(600)  # a batch trains
        assert not cut.done() and not late.done()
        await scene.publish(V1)
        woken_at = now_s()
        assert [await late, await cut] == [V1, V1]
        assert now_s() - woken_at == pytest.approx(30.0, abs=0.1)

    run(scenario())


def test_a_turn_that_every_rest_cuts_is_refused_with_the_reason():
    async def scenario():
        scene, _, _ = await two_workers()
        long = asyncio.create_task(engines_of(scene).turn(30.0, prefer=None))
        for batch in range(1, TRIES + 1):
            await asyncio.sleep(10)
            await scene.registry.rest()
            await scene.publish(V0._replace(batches=batch))
        with pytest.raises(LeaseLost, match="has ended: the trainer needs its devices"):
            await long

    run(scenario())


def test_a_turn_that_no_wake_serves_within_the_stall_timeout_is_refused_with_the_reason():
    async def scenario():
        scene, _, _ = await two_asleep()
        asked_at = now_s()
        asleep = "2 registered, asleep until the trainer leaves their devices"
        with pytest.raises(NoWorkerError, match=f"was free within 900 s .*: {asleep}"):
            await engines_of(scene).turn(5.0, prefer=None)
        assert 900 <= now_s() - asked_at < 2 * 900

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
