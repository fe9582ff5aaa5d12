"""Workers that die, freeze or dawdle, under a real registry in a clock that jumps."""

import asyncio
import itertools

import pytest
from faulty_workers import PHASES, V0, V1, V2, Scene, now_s
from scripted import run

from async_grpo.controller.heartbeat import TICKS
from async_grpo.types import Pulse, RequestPulse
from async_grpo.util import deadlines
from async_grpo.util.errors import (
    DeadlineError,
    LeaseLost,
    LossCause,
    NoWorkerError,
    ProcessLostError,
    WorkerError,
)

INTERVAL_S, LEASE_S = 5.0, 30.0
KINDS = ("raises", "stalls", "dies")


async def two_workers(**options):
    scene = Scene(ping_interval_s=INTERVAL_S, **options)
    first, second = await scene.join("first"), await scene.join("second")
    await scene.publish(V0)
    return scene, first, second


async def lease_on(scene, name, version=V0):
    """One on this worker; those on others are given back."""
    leases = [await scene.lease(version) for _ in scene.workers]
    (wanted,) = [lease for lease in leases if lease.worker_id == name]
    for lease in leases:
        if lease is not wanted:
            await scene.give_back(lease)
    return wanted


async def call(scene, name, *, seconds=1.0, **options):
    """The version that a worker answers under a lease on it."""
    async with scene.registry.lease(1.0, timeout_s=100.0, prefer=name, **options) as worker:
        assert worker.worker_id == name
        return await worker.call("generate", seconds)


async def lost(awaited):
    with pytest.raises(LeaseLost) as caught:
        await awaited
    return caught.value


def test_the_holders_of_leases_on_a_dead_worker_hear_of_it_at_once_and_it_gets_no_more():
    async def scenario():
        scene, first, _ = await two_workers()
        calls = [asyncio.create_task(call(scene, "first", seconds=100.0)) for _ in range(2)]
        idle = await scene.lease(prefer="first")  # one that has not called yet
        await asyncio.sleep(12)
        died_at = now_s()
        first.die()
        for held in (*calls, idle.call("generate", 1.0)):
            error = await lost(held)
            assert (error.cause, "worker first died" in str(error)) == (LossCause.DIED, True)
        assert now_s() - died_at < 0.01
        taken = [await scene.lease() for _ in range(4)]  # all that the other one has room for
        assert {lease.worker_id for lease in taken} == {"second"}
        assert not await scene.give_back(idle)
        assert scene.counts == {"registered": 2, "fenced: died": 1, "revoked: died": 3}

    run(scenario())


def test_what_a_worker_told_of_answers_that_never_came_is_counted_by_cause():
    async def scenario():
        scene, first, _ = await two_workers()
        asked = asyncio.create_task(call(scene, "first", seconds=100.0))
        given_up = asyncio.create_task(call(scene, "second", seconds=100.0))
        await asyncio.sleep(0)
        ((lease_id, _),) = scene.registry._members["first"].leases.items()
        first.pulse = lambda now: Pulse("1.0", 17, {lease_id: RequestPulse(17, False)})
        await asyncio.sleep(3 * INTERVAL_S)
        given_up.cancel()
        first.die()
        await lost(asked)
        assert scene.registry.take_lost() == {
            "lost_turns_owner lost": 1, "lost_tokens_owner lost": 0,
            "lost_turns_died": 1, "lost_tokens_died": 17,
        }  # fmt: skip
        await call(scene, "second")
        assert not scene.registry.take_lost()

    run(scenario())


def test_a_death_that_a_call_meets_first_fences_before_the_next_ping():
    async def scenario():
        scene, first, _ = await two_workers()
        other = await scene.lease(prefer="first")

        async def broken(seconds):
            raise ProcessLostError("worker first died")

        first.generate = broken
        error = await lost(call(scene, "first"))
        assert error.cause == LossCause.DIED
        assert (scene.killed, scene.names) == (["first"], ["second"])
        assert (await other.ended).cause == LossCause.DIED

    run(scenario())


def test_a_zombies_answer_frees_nothing_of_the_worker_that_came_back():
    async def scenario():
        scene = Scene()
        zombie = await scene.join("only", capacity=1.0)
        await scene.publish(V0)
        old = await scene.lease()
        zombie.die()
        await asyncio.sleep(1)
        await scene.join("only", capacity=1.0)
        await scene.lease()
        assert not await scene.give_back(old)
        with pytest.raises(NoWorkerError):
            await scene.lease()

    run(scenario())


def test_a_lease_whose_holder_is_cancelled_is_free_again_and_its_work_ends():
    async def scenario():
        scene, first, _ = await two_workers()
        ended = []

        async def work(seconds):
            try:
                await asyncio.sleep(seconds)
            finally:
                ended.append(now_s())

        first.generate = work
        holder = asyncio.create_task(call(scene, "first", seconds=100.0))
        await asyncio.sleep(3)
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
        await asyncio.sleep(0)
        assert (ended, scene.num_leases) == ([pytest.approx(3.0, abs=1.5)], 0)

    run(scenario())


def test_a_lease_that_comes_when_its_asker_is_cancelled_is_free_again():
    async def scenario():
        scene = Scene()
        await scene.join("only", capacity=1.0)
        await scene.publish(V0)
        held = await scene.lease()
        asker = asyncio.create_task(scene.lease(timeout_s=100.0))
        await asyncio.sleep(1)
        await scene.give_back(held)  # the asker has the lease, and has not woken yet
        asker.cancel()
        await asyncio.gather(asker, return_exceptions=True)
        assert scene.num_leases == 0
        assert (await scene.lease(timeout_s=1.0)).worker_id == "only"

    run(scenario())


def test_a_frozen_worker_is_fenced_in_time_and_its_answer_refused_when_it_wakes():
    async def scenario():
        scene, first, _ = await two_workers()
        answer = asyncio.create_task(call(scene, "first"))
        await asyncio.sleep(0)
        zombie = asyncio.create_task(first.generate(1.0))
        frozen_at = now_s()
        first.freeze()
        error = await lost(answer)
        assert error.cause == LossCause.SILENT
        assert str(error).endswith("generation worker first has not answered for 30 s")
        assert LEASE_S - INTERVAL_S <= now_s() - frozen_at <= LEASE_S + INTERVAL_S
        assert scene.killed == ["first"]
        first.dead.clear()  # as if it could not be killed
        first.wake()
        assert await zombie == V0
        back = await scene.join("first again")
        assert back.version == V0
        assert "fenced: silent" in scene.counts

    run(scenario())


def test_an_answer_that_comes_with_the_end_of_its_lease_is_refused():
    async def scenario():
        scene, first, _ = await two_workers()

        async def answer_and_leave(seconds):
            scene.registry.deregister("first")
            return "too late"

        first.generate = answer_and_leave
        assert (await lost(call(scene, "first"))).cause == LossCause.LEFT

    run(scenario())


def test_an_error_of_the_worker_is_its_holders_and_costs_no_lease():
    async def scenario():
        scene, first, _ = await two_workers()

        async def refuse(seconds):
            raise WorkerError("another temperature")

        first.generate = refuse
        with pytest.raises(WorkerError, match="another temperature"):
            await call(scene, "first")
        assert (scene.num_leases, scene.killed) == (0, [])

    run(scenario())


def test_a_preferred_worker_is_taken_if_it_can_take_work_and_never_waited_for():
    async def scenario():
        scene, _, _ = await two_workers()
        assert {(await scene.lease(prefer="first")).worker_id for _ in range(4)} == {"first"}
        assert (await scene.lease(prefer="first")).worker_id == "second"
        assert (await scene.lease(prefer="nobody")).worker_id == "second"

    run(scenario())


def test_workers_whose_weights_are_not_the_trainers_need_no_publication():
    async def scenario():
        scene = Scene(role="verifier")
        await scene.join("pool")
        scene.registry.end_run()
        assert (await scene.lease(None)).worker_id == "pool"
        assert scene.workers["pool"].updates == []

    run(scenario())


def test_a_registry_that_was_frozen_itself_accuses_nobody():
    async def scenario():
        scene, _, _ = await two_workers()
        await asyncio.sleep(7)
        loop = asyncio.get_running_loop()
        loop._jump.now_s += 10 * (LEASE_S + INTERVAL_S)  # every timer is late at once
        await asyncio.sleep(60)
        assert len(scene.names) == 2
        assert scene.killed == []

    run(scenario())
    assert TICKS > 2


def test_a_worker_that_is_ten_times_slower_is_kept_and_given_less():
    async def scenario():
        scene, _, _ = await two_workers()
        seconds, done = {"first": 10.0, "second": 1.0}, {"first": 0, "second": 0}

        async def ask():
            while True:
                async with scene.registry.lease(1.0, version=V0, timeout_s=100.0) as worker:
                    await worker.call("generate", seconds[worker.worker_id])
                done[worker.worker_id] += 1

        askers = [asyncio.create_task(ask()) for _ in range(12)]  # 8 can be served at a time
        await asyncio.sleep(300)
        for asker in askers:
            asker.cancel()
        assert done["second"] == pytest.approx(10 * done["first"], rel=0.05)
        assert sum(done.values()) == pytest.approx(300 * 4 * 1.1, rel=0.05)
        assert scene.killed == []

    run(scenario())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", PHASES)
def test_an_update_that_fails_at_one_worker_holds_up_no_other(phase, kind, monkeypatch):
    monkeypatch.setattr(deadlines, "LATE_LOADS_S", 10.0)

    async def scenario():
        scene, first, second = await two_workers()
        lease = await lease_on(scene, "first")
        first.fault = (phase, kind)
        started = now_s()
        publishing = asyncio.create_task(scene.publish(V1, timeout_s=60.0))
        served = await scene.lease(V1, timeout_s=50.0)  # as soon as anybody has it
        assert served.worker_id == "second"
        assert now_s() - started < 1.0
        report = await publishing
        assert [ack.worker_id for ack in report.acks] == ["second"]
        if kind == "stalls":
            assert (report.failures, report.late) == ({}, ("first",))
            assert now_s() - started < 12.0
        else:
            assert (set(report.failures), report.late) == ({"first"}, ())
            assert now_s() - started < 1.0
        cause = (await lease.ended).cause
        assert cause == (LossCause.DIED if kind == "dies" else LossCause.UPDATE)
        assert now_s() - started <= 61.0
        assert scene.killed == ["first"]
        assert scene.names == ["second"]
        successor = await scene.join("third")
        assert (successor.updates, successor.version) == ([V1], V1)
        assert {(await scene.lease(V1)).worker_id for _ in range(4)} == {"second", "third"}
        assert second.is_whole

    run(scenario())


def test_who_needs_long_for_an_update_gets_work_when_it_has_it(monkeypatch):
    monkeypatch.setattr(deadlines, "LATE_LOADS_S", 10.0)

    async def scenario():
        scene, first, _ = await two_workers()
        first.phase_s = 5.0
        started = now_s()
        report = await scene.publish(V1)
        assert (report.late, len(report.acks)) == (("first",), 1)
        early = [await scene.lease(V1) for _ in range(4)]
        assert {lease.worker_id for lease in early} == {"second"}
        late = await scene.lease(V1, timeout_s=60.0)
        assert late.worker_id == "first"
        assert now_s() - started == pytest.approx(6 * 5.0)
        assert scene.killed == []

    run(scenario())


def test_weights_that_come_after_the_end_of_their_run_serve_nobody():
    async def scenario():
        scene, _, _ = await two_workers()
        publishing = asyncio.create_task(scene.publish(V1))
        await asyncio.sleep(0.25)
        scene.registry.end_run()
        assert len((await publishing).acks) == 2
        with pytest.raises(NoWorkerError, match="weights published: none yet"):
            await scene.lease(V1)

    run(scenario())


def test_pings_do_not_wait_for_a_load():
    async def scenario():
        scene, first, _ = await two_workers()
        first.phase_s = 3 * LEASE_S
        await scene.publish(V1, timeout_s=1000.0)
        await asyncio.sleep(7 * 3 * LEASE_S)
        assert first.version == V1
        assert scene.killed == []

    run(scenario())


def test_whoever_joins_during_an_update_serves_the_new_weights_first():
    async def scenario():
        scene, _, _ = await two_workers()
        publishing = asyncio.create_task(scene.publish(V1))
        await asyncio.sleep(0.25)
        joining = asyncio.create_task(scene.join("third"))
        await asyncio.sleep(0.3)
        overtaken = asyncio.create_task(scene.publish(V2))
        third = await joining
        await asyncio.gather(publishing, overtaken)
        assert third.version == V2
        assert {(await scene.lease(V2)).worker_id for _ in range(6)} == set(scene.workers)

    run(scenario())


@pytest.mark.parametrize(("size_bytes", "seconds"), [(0, 1190.0), (141 * 10**9, 1310.0)])
def test_who_joins_has_longer_to_load_more_bytes_and_not_for_ever(size_bytes, seconds):
    """70B parameters in bfloat16 need 705 s at 0.2 GB/s, beside the 600 s that any load has."""

    async def scenario():
        scene = Scene()
        await scene.publish(V0, size_bytes=size_bytes)
        with pytest.raises(DeadlineError, match=f"within {600 + size_bytes / 0.2e9:g} s"):
            await scene.join("slow", phase_s=seconds / len(PHASES))
        if size_bytes:
            assert (await scene.join("fast", phase_s=1300.0 / len(PHASES))).version == V0

    run(scenario())


def test_a_worker_that_freezes_while_it_joins_is_not_waited_for():
    async def scenario():
        scene, _, _ = await two_workers()
        started = now_s()

        async def freeze():
            await asyncio.sleep(0.25)
            scene.workers["third"].freeze()

        freezing = asyncio.create_task(freeze())
        with pytest.raises(WorkerError, match="third has not answered for 30 s"):
            await scene.join("third")
        await freezing
        assert now_s() - started <= LEASE_S + INTERVAL_S

    run(scenario())


def test_when_all_workers_are_lost_work_waits_for_new_ones_or_says_why():
    async def scenario():
        scene, first, second = await two_workers()
        first.die()
        second.die()
        await asyncio.sleep(0.1)
        with pytest.raises(NoWorkerError, match=r"none is registered .*first: worker first died"):
            await scene.lease(timeout_s=20.0)
        waiting = asyncio.create_task(scene.lease(timeout_s=100.0))
        await asyncio.sleep(50)
        await scene.join("third")
        assert (await waiting).worker_id == "third"

    run(scenario())


def test_a_drained_worker_gets_nothing_in_the_next_run_either():
    async def scenario():
        scene, _, _ = await two_workers()
        lease = await lease_on(scene, "first")
        scene.registry.drain("first")
        standing = scene.registry.standing(("first", "nobody"))
        assert {name: each[:3] for name, each in standing.items()} == {
            "first": (True, 1, ""), "nobody": (False, 0, "")
        }  # fmt: skip
        assert {(await scene.lease()).worker_id for _ in range(4)} == {"second"}
        assert await scene.give_back(lease)
        assert scene.registry.standing(("first",))["first"].num_leases == 0
        scene.registry.end_run()
        await scene.publish(V1)
        assert {(await scene.lease(V1)).worker_id for _ in range(4)} == {"second"}
        scene.registry.drain("second")
        waiting = asyncio.create_task(scene.lease(V1, timeout_s=5.0))
        with pytest.raises(NoWorkerError, match="2 registered, 2 of them draining"):
            await waiting
        waiting = asyncio.create_task(scene.lease(V1))
        await asyncio.sleep(1)
        scene.registry.drain("first", draining=False)
        assert (await waiting).worker_id == "first"

    run(scenario())


def test_the_end_of_a_run_ends_its_leases_and_requests_and_refuses_who_waits():
    async def scenario():
        scene, first, second = await two_workers()
        leases = [await scene.lease() for _ in range(8)]
        waiting = asyncio.create_task(scene.lease(timeout_s=100.0))
        await asyncio.sleep(1)
        scene.registry.end_run()
        assert (await lost(waiting)).cause == LossCause.RUN_ENDED
        assert [await scene.give_back(lease) for lease in leases] == [False] * 8
        await asyncio.sleep(0)
        assert (first.num_aborts, second.num_aborts) == (1, 1)
        assert scene.counts["revoked: run ended"] == 8
        late = await scene.join("late")
        assert late.updates == []  # the weights of the run are forgotten

    run(scenario())


def test_leases_of_all_registries_have_numbers_of_their_own():
    async def scenario():
        numbers = itertools.count(1000)
        scenes = [Scene(lease_ids=numbers) for _ in range(2)]
        for scene in scenes:
            await scene.join("only")
            await scene.publish(V0)
        leases = [await scene.lease() for scene in scenes for _ in range(2)]
        assert [lease.lease_id for lease in leases] == [1000, 1001, 1002, 1003]

    run(scenario())


def test_a_worker_that_has_left_is_not_asked_any_more():
    async def scenario():
        scene, first, second = await two_workers()
        await asyncio.sleep(12)
        scene.registry.deregister("first")
        before = first.num_pings, second.num_pings
        await asyncio.sleep(60)
        assert (first.num_pings, second.num_pings > before[1]) == (before[0], True)
        assert scene.counts == {"registered": 2, "left": 1}

    run(scenario())


def test_what_a_registry_remembers_is_bounded():
    async def scenario():
        scene = Scene()
        for number in range(300):
            worker = await scene.join(f"w{number}")
            worker.die()
            await asyncio.sleep(0.01)
        assert len(scene.registry.history.exclusions) == 256
        assert scene.counts == {"registered": 300, "fenced: died": 300}
        assert len(asyncio.all_tasks()) < 10

    run(scenario())
