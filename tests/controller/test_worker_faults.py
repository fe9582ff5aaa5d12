"""Workers and batchers that die, freeze or dawdle, under a real registry in a clock that jumps."""

import asyncio

import pytest
from faulty_workers import PHASES, V0, V1, V2, Batcher, Scene, now_s
from scripted import Handle, run

from async_grpo.controller.heartbeat import TICKS
from async_grpo.controller.run_watch import LONG_SILENCE_S, TRAINER_SILENCE_S
from async_grpo.errors import DeadlineError, WorkerError

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
            await scene.registry.release(lease.lease_id)
    return wanted


def test_the_holder_of_a_lease_on_a_dead_worker_is_told_at_once():
    async def scenario():
        scene, first, _ = await two_workers()
        lease = await lease_on(scene, "first")
        told = asyncio.create_task(scene.registry.until_revoked(lease.lease_id))
        await asyncio.sleep(12)
        died_at = now_s()
        first.die()
        assert (await told).startswith("died: worker first died")
        assert now_s() - died_at < 0.01
        taken = [await scene.lease() for _ in range(4)]  # all that the other one has room for
        assert {lease.worker_id for lease in taken} == {"second"}
        assert not await scene.registry.release(lease.lease_id)
        assert await scene.registry.until_revoked(lease.lease_id)
        assert await scene.counts() == {
            "registered": 2, "fenced: died": 1, "revoked: died": 1
        }  # fmt: skip

    run(scenario())


def test_a_frozen_worker_is_fenced_in_time_and_its_answer_refused_when_it_wakes():
    async def scenario():
        scene, first, _ = await two_workers()
        lease = await lease_on(scene, "first")
        answer = asyncio.create_task(first.generate(1.0))
        frozen_at = now_s()
        first.freeze()
        reason = await scene.registry.until_revoked(lease.lease_id)
        assert reason == "silent: generation worker first has not answered for 30 s"
        assert LEASE_S - INTERVAL_S <= now_s() - frozen_at <= LEASE_S + INTERVAL_S
        assert scene.killed == ["first"]
        first.dead.clear()  # as if it could not be killed
        first.wake()
        assert await answer == V0
        assert not await scene.registry.release(lease.lease_id)
        back = await scene.join("first again")
        assert back.version == V0
        assert "fenced: silent" in await scene.counts()

    run(scenario())


def test_a_registry_that_was_frozen_itself_accuses_nobody():
    async def scenario():
        scene, _, _ = await two_workers()
        await asyncio.sleep(7)
        loop = asyncio.get_running_loop()
        loop._jump.now_s += 10 * (LEASE_S + INTERVAL_S)  # every timer is late at once
        await asyncio.sleep(60)
        assert len(await scene.registry.members()) == 2
        assert scene.killed == []

    run(scenario())
    assert TICKS > 2


def test_a_worker_that_is_ten_times_slower_is_kept_and_given_less():
    async def scenario():
        scene, _, _ = await two_workers()
        seconds, done = {"first": 10.0, "second": 1.0}, {"first": 0, "second": 0}

        async def ask():
            while True:
                lease = await scene.lease(timeout_s=100.0)
                await lease.handle.generate.remote(seconds[lease.worker_id])
                assert await scene.registry.release(lease.lease_id)
                done[lease.worker_id] += 1

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
def test_an_update_that_fails_at_one_worker_holds_up_no_other(phase, kind):
    async def scenario():
        scene, first, second = await two_workers(patience_s=10.0)
        lease = await lease_on(scene, "first")
        end = asyncio.create_task(scene.registry.until_revoked(lease.lease_id))
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
        told = await end
        assert told.partition(":")[0] == ("died" if kind == "dies" else "update")
        assert now_s() - started <= 61.0
        assert scene.killed == ["first"]
        assert [info.worker_id for info in await scene.registry.members()] == ["second"]
        successor = await scene.join("third")
        assert (successor.updates, successor.version) == ([V1], V1)
        assert {(await scene.lease(V1)).worker_id for _ in range(4)} == {"second", "third"}
        assert second.is_whole

    run(scenario())


def test_who_needs_long_for_an_update_gets_work_when_it_has_it():
    async def scenario():
        scene, first, _ = await two_workers(patience_s=10.0)
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
        await scene.registry.end_run()
        assert len((await publishing).acks) == 2
        with pytest.raises(DeadlineError, match="weights published: none yet"):
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
        with pytest.raises(DeadlineError, match=r"none is registered .*first: worker first died"):
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
        await scene.registry.drain("first")
        standing = await scene.registry.standing(("first", "nobody"))
        assert {name: each[:3] for name, each in standing.items()} == {
            "first": (True, 1, ""), "nobody": (False, 0, "")
        }  # fmt: skip
        assert {(await scene.lease()).worker_id for _ in range(4)} == {"second"}
        assert await scene.registry.release(lease.lease_id)
        assert (await scene.registry.standing(("first",)))["first"].num_leases == 0
        await scene.registry.begin_run()
        await scene.publish(V1)
        assert {(await scene.lease(V1)).worker_id for _ in range(4)} == {"second"}
        await scene.registry.drain("second")
        waiting = asyncio.create_task(scene.lease(V1, timeout_s=5.0))
        with pytest.raises(DeadlineError, match="2 registered, 2 of them draining"):
            await waiting
        waiting = asyncio.create_task(scene.lease(V1))
        await asyncio.sleep(1)
        await scene.registry.drain("first", False)
        assert (await waiting).worker_id == "first"

    run(scenario())


def test_the_work_of_a_batcher_that_died_ends_and_weights_stay_for_the_next():
    async def scenario():
        scene, first, second = await two_workers()
        batcher, successor = Batcher(), Batcher()
        await scene.registry.begin_run(Handle(batcher))
        await scene.publish(V1)
        leases = [await scene.lease(V1) for _ in range(8)]
        waiting = asyncio.create_task(scene.lease(V1, timeout_s=100.0))
        await asyncio.sleep(10)
        died_at, batcher.is_dead = now_s(), True
        with pytest.raises(WorkerError, match="the experience batcher died"):
            await waiting
        assert now_s() - died_at <= 3.0
        assert [await scene.registry.release(lease.lease_id) for lease in leases] == [False] * 8
        assert (first.num_aborts, second.num_aborts) == (2, 2)  # for begin_run too
        session = await scene.registry.session()
        await scene.registry.replace_batcher(Handle(successor))
        await asyncio.sleep(10 * TRAINER_SILENCE_S)
        assert (await scene.lease(V1)).version == V1  # nothing was published again
        assert await scene.registry.session() == session
        assert (await scene.counts())["revoked: batcher died"] == 8

    run(scenario())


def test_a_trainer_that_died_leaves_no_weights_behind():
    async def scenario():
        scene, _, _ = await two_workers()
        batcher = Batcher()
        await scene.registry.begin_run(Handle(batcher))
        await scene.publish(V1)
        session = await scene.registry.session()
        batcher.is_dead = True
        await asyncio.sleep(TRAINER_SILENCE_S + 5)
        assert (await scene.registry.status()).serves is None
        with pytest.raises(DeadlineError, match="weights published: none yet"):
            await scene.lease(V1)
        late = await scene.join("late")
        assert late.updates == []
        assert await scene.registry.session() != session  # a trainer that only slept is told

    run(scenario())


def test_a_registry_that_never_knew_the_batcher_hears_that_the_trainer_is_silent():
    async def scenario():
        scene, _, _ = await two_workers()  # and weights, of a trainer that announced them again
        lease = await lease_on(scene, "first")
        await asyncio.sleep(3 * LONG_SILENCE_S)
        assert (await scene.registry.status()).serves == V0  # it may be one that never asks
        for _ in range(10):
            await scene.registry.session()
            await asyncio.sleep(LONG_SILENCE_S / 2)
        assert (await scene.registry.status()).serves == V0
        await asyncio.sleep(LONG_SILENCE_S)
        assert (await scene.registry.status()).serves is None
        assert not await scene.registry.release(lease.lease_id)

    run(scenario())


def test_a_trainer_that_is_heard_of_keeps_its_weights():
    async def scenario():
        scene, _, _ = await two_workers()
        batcher = Batcher()
        await scene.registry.begin_run(Handle(batcher))
        await scene.publish(V1)
        batcher.is_dead = True
        for _ in range(10):
            await asyncio.sleep(TRAINER_SILENCE_S / 2)
            await scene.registry.session()
        assert (await scene.registry.status()).serves == V1

    run(scenario())


def test_a_restarted_registry_grants_no_lease_of_its_former_life():
    async def scenario():
        former, _, _ = await two_workers()
        old = [await former.lease() for _ in range(8)]
        await asyncio.sleep(1)
        scene, _, _ = await two_workers()
        new = [await scene.lease() for _ in range(8)]
        assert not {lease.lease_id for lease in old} & {lease.lease_id for lease in new}
        assert [await scene.registry.release(lease.lease_id) for lease in old] == [False] * 8
        assert await scene.registry.until_revoked(old[0].lease_id)
        assert (await scene.registry.status()).leases == 8

    run(scenario())


def test_a_worker_that_has_left_is_not_asked_any_more():
    async def scenario():
        scene, first, second = await two_workers()
        await asyncio.sleep(12)
        await scene.registry.deregister("first")
        before = first.num_pings, second.num_pings
        await asyncio.sleep(60)
        assert (first.num_pings, second.num_pings > before[1]) == (before[0], True)
        assert await scene.counts() == {"registered": 2, "left": 1}

    run(scenario())


def test_what_a_registry_remembers_is_bounded():
    async def scenario():
        scene = Scene()
        for number in range(300):
            worker = await scene.join(f"w{number}")
            worker.die()
            await asyncio.sleep(0.01)
        assert len(await scene.registry.fenced()) == 256
        assert len(await scene.registry.history()) == 256
        assert (await scene.counts()) == {"registered": 300, "fenced: died": 300}
        assert len(asyncio.all_tasks()) < 10

    run(scenario())
