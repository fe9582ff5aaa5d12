"""A worker that keeps its weights for an evaluation, under a real registry."""

import asyncio

import pytest
from faulty_workers import V0, V1, V2, Scene
from scripted import run

from async_grpo.types import WeightsVersion
from async_grpo.util.errors import NoWorkerError


async def scene_of(*names, **options):
    scene = Scene(**options)
    for name in names:
        await scene.join(name)
    await scene.publish(V0)
    return scene


def versions(scene):
    return {name: worker.version for name, worker in scene.workers.items()}


def test_a_held_worker_gets_no_update_until_the_end_and_then_the_latest():
    async def scenario():
        scene = await scene_of("a", "b")
        with scene.registry.held(V0) as hold:
            other = "b" if hold.worker_id == "a" else "a"
            for version in (V1, V2):
                report = await scene.publish(version)
                assert [ack.worker_id for ack in report.acks] == [other]
                assert (report.failures, report.late) == ({}, ())
            assert versions(scene) == {hold.worker_id: V0, other: V2}
            assert hold.worker_id not in scene.registry.receivers
        await asyncio.sleep(5)
        assert versions(scene) == {"a": V2, "b": V2}
        assert scene.workers[hold.worker_id].updates == [V0, V2]

    run(scenario())


def test_training_gets_a_held_worker_until_it_is_too_old_and_again_when_it_has_caught_up():
    async def scenario():
        scene = await scene_of("a", "b")
        with scene.registry.held(V0) as hold:
            await scene.publish(V1)
            old = {(await scene.lease(V0)).worker_id for _ in range(4)}
            new = {(await scene.lease(V1)).worker_id for _ in range(2)}
            assert old == {"a", "b"} and hold.worker_id not in new
        await asyncio.sleep(5)
        assert hold.worker_id in {(await scene.lease(V1)).worker_id for _ in range(2)}

    run(scenario())


def test_leases_of_a_hold_are_on_its_worker_alone_and_let_others_pass():
    async def scenario():
        scene = await scene_of("a", "b")
        with scene.registry.held(V0) as hold:
            taken = [await scene.lease(hold=hold) for _ in range(4)]  # its capacity
            assert {lease.worker_id for lease in taken} == {hold.worker_id}
            waiting = asyncio.create_task(scene.lease(hold=hold, timeout_s=100.0))
            await asyncio.sleep(0)
            passing = await scene.lease()
            assert passing.worker_id != hold.worker_id and not waiting.done()
            await scene.give_back(taken.pop())
            assert (await waiting).worker_id == hold.worker_id

    run(scenario())


def test_an_evaluation_that_shares_the_only_worker_takes_one_that_comes_with_its_weights():
    async def scenario():
        scene = await scene_of("a")
        with scene.registry.held(V0) as hold:
            shared = await scene.lease(hold=hold)
            await scene.join("b")
            assert hold.worker_id == "b"
            assert (await scene.lease(hold=hold)).worker_id == "b"
            await scene.publish(V1)
            assert versions(scene) == {"a": V1, "b": V0}
            assert shared.worker_id == "a" and shared.is_valid

    run(scenario())


def test_who_comes_with_newer_weights_than_are_evaluated_trains():
    async def scenario():
        scene = await scene_of("a")
        with scene.registry.held(V0) as hold:
            await scene.publish(V1)
            await scene.join("b")
            assert hold.worker_id == ""
            await scene.publish(V2)
            assert versions(scene) == {"a": V2, "b": V2}

    run(scenario())


def test_the_only_worker_is_never_held_and_an_evaluation_shares_it():
    async def scenario():
        scene = await scene_of("a")
        with scene.registry.held(V0) as hold:
            assert hold.worker_id == ""
            assert scene.registry.room(hold) == 0.5  # of 4: an eighth
            assert scene.registry.room(None) == 4.0
            await scene.publish(V1)
            assert versions(scene) == {"a": V1}
            assert (await scene.lease(V0, hold=hold)).worker_id == "a"

    run(scenario())


def test_a_hold_whose_worker_dies_goes_to_another_and_who_waits_for_it_goes_along():
    async def scenario():
        scene = await scene_of("a", "b", "c")
        with scene.registry.held(V0) as hold:
            first = hold.worker_id
            leases = [await scene.lease(hold=hold) for _ in range(4)]
            waiting = asyncio.create_task(scene.lease(hold=hold, timeout_s=100.0))
            await scene.publish(V1)
            scene.workers[first].die()
            await asyncio.sleep(40)
            second = hold.worker_id
            assert second not in ("", first) and (await waiting).worker_id == second
            assert not any(lease.is_valid for lease in leases)
            await scene.publish(V2)
            assert scene.workers[second].version == V1

    run(scenario())


def test_training_gets_a_held_worker_back_when_it_has_no_other():
    async def scenario():
        scene = await scene_of("a", "b")
        with scene.registry.held(V0) as hold:
            held, other = hold.worker_id, "b" if hold.worker_id == "a" else "a"
            await scene.publish(V1)
            scene.workers[other].die()
            await asyncio.sleep(40)
            assert hold.worker_id == ""
            assert scene.workers[held].version == V1
            assert (await scene.lease(V1)).worker_id == held
            assert (await scene.lease(V0, hold=hold)).worker_id == held

    run(scenario())


@pytest.mark.parametrize("drained", ["held", "other"])
def test_a_worker_that_is_drained_is_neither_held_nor_counted_as_training_s(drained):
    async def scenario():
        scene = await scene_of("a", "b", "c")
        with scene.registry.held(V0) as hold:
            held = hold.worker_id
            others = [name for name in "abc" if name != held]
            for name in [held] if drained == "held" else others:
                scene.registry.drain(name)
            assert hold.worker_id == (others[0] if drained == "held" else "")
            await scene.publish(V1)
            assert scene.workers[held].version == V1

    run(scenario())


def test_a_run_that_ends_amid_an_evaluation_leaves_nobody_held():
    async def scenario():
        scene = await scene_of("a", "b")
        with pytest.raises(asyncio.CancelledError), scene.registry.held(V0):
            scene.registry.end_run()
            raise asyncio.CancelledError
        assert scene.registry.receivers.keys() >= set("ab")
        later = WeightsVersion(2, 0)
        await scene.publish(later)
        assert set(versions(scene).values()) == {later}

    run(scenario())


def test_a_hold_asks_for_weights_that_somebody_serves():
    async def scenario():
        scene = await scene_of("a", "b", "c")
        scene.workers["a"].phase_s = 1000.0  # it loads for long, the others go on
        await scene.publish(V1)
        with scene.registry.held(V1) as hold:
            assert hold.worker_id in ("b", "c")
            with pytest.raises(NoWorkerError):
                await scene.lease(V2, hold=None)

    run(scenario())


def test_who_waits_for_the_held_worker_holds_up_nobody_who_waits_for_any():
    async def scenario():
        scene = await scene_of("a", "b")
        with scene.registry.held(V0) as hold:
            taken = [await scene.lease() for _ in range(8)]  # all that both have
            first = asyncio.create_task(scene.lease(hold=hold, timeout_s=100.0))
            await asyncio.sleep(0)
            second = asyncio.create_task(scene.lease(timeout_s=100.0))
            await asyncio.sleep(0)
            free = next(lease for lease in taken if lease.worker_id != hold.worker_id)
            await scene.give_back(free)
            await asyncio.sleep(0.1)
            assert (first.done(), second.done()) == (False, True)
            mine = next(lease for lease in taken if lease.worker_id == hold.worker_id)
            await scene.give_back(mine)
            assert (await first).worker_id == hold.worker_id

    run(scenario())
