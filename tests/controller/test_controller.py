"""The controller without Ray: runs that begin, end, are silent or die, and work that is asked."""

import asyncio
import gc

import pytest
from faulty_workers import FOREVER_S, Worker, now_s
from scripted import Handle, make_completion, make_verdict, run
from scripted_run import QUESTIONS, make_config

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.records import BatcherPlan
from async_grpo.config.roles import GENERATION, VERIFIER, service, teacher
from async_grpo.controller import controller as module
from async_grpo.controller.controller import (
    IDLE_TICKS,
    SILENT_TICKS,
    UNWITNESSED_TICKS,
    Controller,
)
from async_grpo.types import (
    GradingRequest,
    RunId,
    SamplingContract,
    ServiceRequest,
    VerificationRequest,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.util.deadlines import OTHER_RUN_ENDED_S
from async_grpo.util.errors import (
    ConfigError,
    LeaseLost,
    LossCause,
    NoWorkerError,
    ProcessLostError,
    RunLost,
    WorkerError,
)

CODE = "this source"
MATH = teacher("math")


class Witness:
    """Lives as long as its trainer."""

    def __init__(self):
        self.death = asyncio.Event()

    async def until_death(self):
        await self.death.wait()
        raise ProcessLostError("its process has ended")


class House:
    """A controller, and what it has killed."""

    def __init__(self):
        self.killed = []
        self.controller = Controller(CODE, kill=self._kill)
        self.witness = Witness()

    def _kill(self, handle):
        self.killed.append(getattr(handle, "_actor", handle))

    def num_leases(self, role):
        return sum(len(member.leases) for member in self.controller.registry_of(role).members)

    def plan(self, incarnation):
        return BatcherPlan(
            config=make_config(),
            rules=LocalRules(find_algorithm(make_config())),
            questions=QUESTIONS,
            held_out=QUESTIONS[:1],
            order=lambda ordinal: ordinal % len(QUESTIONS),
            replacement=lambda slot, *, attempt: 0,
            seed_of=None,
            sampling=SamplingContract(1.0, (1,), 12),
            num_ranks=1,
            incarnation=incarnation,
        )

    async def begin(self, incarnation=5, *, witness=None):
        handle = Handle(witness or self.witness)
        epoch = await self.controller.begin_run(self.plan(incarnation), handle, None)
        return RunId(incarnation, epoch)

    async def join(self, name, role=MATH, *, model_hash="", **options):
        worker = Worker(name, **options)
        info = WorkerInfo(
            name, role, "node", 1, "model", 64, 4.0, 0.0, 512,
            owner="dispatcher process 5 on box", model_hash=model_hash,
        )  # fmt: skip
        await self.controller.register(info, Handle(worker))
        return worker

    async def ask(self, run, seconds=1.0, *, role=MATH, **options):
        return await self.controller.ask(run, role, "generate", seconds, cost=1.0, **options)


@pytest.fixture(autouse=True)
def without_ray(monkeypatch):
    async def trainer_of(witness):
        return "process 77 on 10.0.0.1"

    monkeypatch.setattr(module, "trainer_of", trainer_of)
    monkeypatch.setattr(module, "own_handle", lambda: "the controller")
    yield
    gc.enable()  # most of the runs here have no end


async def lives(house, run_id, seconds):
    """The trainer's thread."""
    for _ in range(int(seconds)):
        await house.controller.heard(run_id)
        await asyncio.sleep(1.0)


async def ends_with(awaited, error):
    with pytest.raises(error) as caught:
        await awaited
    return str(caught.value)


async def lost(awaited):
    with pytest.raises(LeaseLost) as caught:
        await awaited
    return caught.value


CALLS = {
    "heard": (),
    "end_run": (),
    "publish": (WeightsSnapshot(WeightsVersion(5, 0), ()), (GENERATION,), 60.0),
    "published": (WeightsVersion(5, 0),),
    "next_items": (0, 0),
    "hungry": (0,),
    "evaluated": (),
    "status": (),
    "abort": ("because",),
}


@pytest.mark.parametrize("method", CALLS)
def test_a_call_of_another_epoch_is_refused_at_once_and_told_why(method):
    async def scenario():
        house = House()
        old = await house.begin()
        new = await house.begin()
        assert new.epoch > old.epoch
        why = await ends_with(getattr(house.controller, method)(old, *CALLS[method]), RunLost)
        assert why.endswith("trainer process 77 on 10.0.0.1 has begun it again")
        stranger = RunId(4, new.epoch)
        why = await ends_with(getattr(house.controller, method)(stranger, *CALLS[method]), RunLost)
        assert "is not known here" in why
        await house.controller.heard(new)

    run(scenario())


def test_who_waits_for_an_item_an_evaluation_or_an_answer_hears_of_the_runs_end():
    async def scenario():
        house = House()
        run_id = await house.begin()
        await house.join("teacher")
        engine = await house.join("engine", GENERATION)
        snapshot = WeightsSnapshot(WeightsVersion(5, 0), ())
        await house.controller.publish(run_id, snapshot, (GENERATION,), 60.0)
        engine.generate = lambda request: asyncio.sleep(FOREVER_S)
        await house.controller.published(run_id, snapshot.version)
        waiting = [
            asyncio.ensure_future(house.controller.next_items(run_id, 0, 0)),
            asyncio.ensure_future(house.controller.evaluated(run_id)),
            asyncio.ensure_future(house.ask(run_id, FOREVER_S)),
        ]
        await asyncio.sleep(5)
        await house.controller.end_run(run_id)
        for one in waiting:
            assert "its trainer has ended it" in await ends_with(one, RunLost)
        assert engine.num_aborts == 1
        assert house.num_leases(GENERATION) == 0
        assert house.controller.registry_of(GENERATION)._updates.snapshot is None

    run(scenario())


def test_garbage_is_looked_for_every_ten_minutes_of_a_run_and_as_ever_without_one(monkeypatch):
    looks = []
    monkeypatch.setattr(module.gc, "collect", lambda: looks.append(now_s()))

    async def scenario():
        house = House()
        begun_s, run_id = now_s(), await house.begin()
        assert not gc.isenabled()
        for _ in range(1_250):
            await asyncio.sleep(1)
            await house.controller.heard(run_id)
        assert [look - begun_s for look in looks] == pytest.approx([600, 1_200], abs=2)
        await house.controller.end_run(run_id)
        assert gc.isenabled()

    run(scenario())


def test_the_death_of_the_trainer_ends_its_run():
    async def scenario():
        house = House()
        run_id = await house.begin()
        waiting = asyncio.ensure_future(house.controller.next_items(run_id, 0, 0))
        await lives(house, run_id, 3 * SILENT_TICKS)
        house.witness.death.set()
        died_s = now_s()
        assert "its process has ended" in await ends_with(waiting, RunLost)
        assert now_s() - died_s == pytest.approx(UNWITNESSED_TICKS, abs=3)
        await house.begin(6, witness=Witness())  # nobody has to be waited for

    run(scenario())


def test_a_trainer_that_says_that_it_lives_outlives_its_witness():
    async def scenario():
        house = House()
        run_id = await house.begin()
        await lives(house, run_id, 5)
        house.witness.death.set()
        await lives(house, run_id, 10 * UNWITNESSED_TICKS)
        house.witness.death.clear()  # another one is there
        await asyncio.sleep(UNWITNESSED_TICKS + 5)
        await house.controller.heard(run_id)  # its silence is a hanging thread's
        house.witness.death.set()
        await asyncio.sleep(UNWITNESSED_TICKS + 5)
        why = await ends_with(house.controller.heard(run_id), RunLost)
        assert "its process has ended" in why

    run(scenario())


def test_a_trainer_that_is_silent_for_a_minute_loses_its_run_and_is_told_so():
    async def scenario():
        house = House()
        run_id = await house.begin()
        await lives(house, run_id, 100)
        await asyncio.sleep(SILENT_TICKS - 5)
        await house.controller.heard(run_id)
        await asyncio.sleep(SILENT_TICKS + 5)
        why = await ends_with(house.controller.heard(run_id), RunLost)
        assert f"has been silent for {SILENT_TICKS} s" in why

    run(scenario())


def test_time_in_which_the_controller_stood_still_is_nobodys_silence():
    async def scenario():
        house = House()
        run_id = await house.begin()
        await house.join("teacher")
        await asyncio.sleep(SILENT_TICKS / 2)
        asyncio.get_running_loop()._jump.now_s += 10 * SILENT_TICKS
        await asyncio.sleep(5)
        await house.controller.heard(run_id)
        assert len(await house.controller.members(MATH)) == 1

    run(scenario())


def test_another_trainer_waits_a_moment_for_the_end_of_a_run_and_is_refused_by_name():
    async def scenario():
        house = House()
        run_id = await house.begin(5)
        started = now_s()
        why = await ends_with(house.begin(6), ConfigError)
        assert "another trainer (process 77 on 10.0.0.1) uses these workers" in why
        assert now_s() - started == pytest.approx(OTHER_RUN_ENDED_S, abs=1.0)
        await house.controller.heard(run_id)
        waiting = asyncio.ensure_future(house.begin(6))
        await asyncio.sleep(5)
        await house.controller.end_run(run_id)
        assert (await waiting).incarnation == 6

    run(scenario())


def test_work_that_is_asked_is_answered_under_a_lease():
    async def scenario():
        house = House()
        run_id = await house.begin()
        worker = await house.join("teacher", version=WeightsVersion(0, 0))
        assert await house.ask(run_id, prefer="teacher") == worker.version
        assert house.num_leases(MATH) == 0
        assert await house.controller.roles() == (MATH,)
        with pytest.raises(ConfigError, match="a role must be one of"):
            await house.ask(run_id, role="judge")

    run(scenario())


def test_a_service_that_nobody_has_started_is_told_with_those_that_there_are():
    async def scenario():
        house = House()
        run_id = await house.begin()
        said = (
            r"must be one of {}, got services\['indx'\]: correct the name, or start it with --mode"
        )
        with pytest.raises(ConfigError, match=said.format("those that have had a worker")):
            await house.ask(run_id, role=service("indx"))
        await house.join("w", service("index"), version=WeightsVersion(0, 0))
        await house.ask(run_id, role=service("index"))
        with pytest.raises(ConfigError, match=said.format("index")):
            await house.ask(run_id, role=service("indx"))

    run(scenario())


def test_what_services_answer_is_counted_once_each():
    async def scenario():
        house = House()
        run_id = await house.begin()
        worker = await house.join("w", service("index"), version=WeightsVersion(0, 0))
        worker.generate = lambda request: asyncio.sleep(0, request.content)
        for content in (b"a", b"b"):
            asked = ServiceRequest(content)
            assert await house.ask(run_id, asked, role=service("index")) == content
        clock = house.controller._current(run_id).pipeline.take_clock()
        assert clock["service_answers"] == 2

    run(scenario())


def test_a_verdict_that_an_environment_asks_for_is_asked_again_while_a_connection_fails():
    away = make_verdict(0.0, status="error", reason="mine: refused", cause="connection")
    good, asked = make_verdict(1.0), []
    answers = [(good, away), (good,)]
    completion = make_completion(WeightsVersion(5, 0))
    outputs = tuple(VerificationRequest(0, n, QUESTIONS[0], completion) for n in range(2))

    async def verify(request):
        asked.append([output.index for output in request.outputs])
        return answers.pop(0)

    async def scenario():
        house = House()
        run_id = await house.begin()
        pool = Worker("pool")
        pool.verify = verify
        info = WorkerInfo("pool", VERIFIER, "node", 1, "", 0, 4.0, 0.0, 0)
        await house.controller.registry_of(VERIFIER).register(info, Handle(pool))
        found = await house.controller.ask(
            run_id, VERIFIER, "verify", GradingRequest(outputs), cost=2.0
        )
        assert (found, asked) == ((good, good), [[0, 1], [1]])
        (told,) = (await house.controller.status(run_id)).warnings
        assert "mine: refused: a connection that it needs fails, it is asked again" in told

    run(scenario())


def test_an_asker_hears_that_its_worker_is_lost_or_that_there_is_none():
    async def scenario():
        house = House()
        run_id = await house.begin()
        worker = await house.join("teacher")
        asked = asyncio.ensure_future(house.ask(run_id, 100.0))
        await asyncio.sleep(1)
        worker.die()
        assert (await lost(asked)).cause == LossCause.DIED
        beating = asyncio.ensure_future(lives(house, run_id, 100))
        with pytest.raises(NoWorkerError, match="no teacher:math worker was free"):
            await house.ask(run_id)
        beating.cancel()

    run(scenario())


def test_asked_work_ends_with_the_lease_under_which_its_asker_works():
    async def scenario():
        house = House()
        run_id = await house.begin()
        await house.join("teacher")
        asker = await house.join("asker", "environment")

        async def environment():
            work = house.controller.registry_of("environment").lease(1.0, timeout_s=60.0)
            async with work as own:
                asked = asyncio.ensure_future(house.ask(run_id, FOREVER_S, owner=own.lease_id))
                other = asyncio.ensure_future(house.ask(run_id, 5.0))
                await asyncio.sleep(1)
                asker.die()
                assert (await lost(asked)).cause == LossCause.OWNER
                await other
                await lost(house.ask(run_id, owner=own.lease_id))  # a zombie's question

        assert (await lost(environment())).cause == LossCause.DIED
        assert house.num_leases(MATH) == 0

    run(scenario())


def test_other_source_is_refused_naming_its_users_and_takes_over_when_there_are_none():
    async def scenario():
        house = House()
        await house.join("engine")
        why = await ends_with(house.controller.hello("other source"), ConfigError)
        assert "stop dispatcher process 5 on box first" in why
        await house.controller.hello(CODE)
        await house.controller.deregister(MATH, "engine")
        run_id = await house.begin()
        why = await ends_with(house.controller.hello("other source"), ConfigError)
        assert "stop trainer process 77 on 10.0.0.1 first" in why
        await house.controller.end_run(run_id)
        waiting = asyncio.ensure_future(house.controller.hello("other source"))
        await asyncio.sleep(1)
        assert house.killed == ["the controller"]
        waiting.cancel()

    run(scenario())


def test_a_controller_that_nobody_needs_ends_itself():
    async def scenario():
        house = House()
        for _ in range(10):  # longer than it would idle
            await house.controller.standing({MATH: ("nobody",)})
            await asyncio.sleep(IDLE_TICKS / 2)
        await house.join("engine")
        await asyncio.sleep(2 * IDLE_TICKS)
        await house.controller.deregister(MATH, "engine")
        assert house.killed == []
        await asyncio.sleep(IDLE_TICKS + 5)
        assert house.killed == ["the controller"]

    run(scenario())


def test_an_aborted_run_tells_every_rank_why_and_stays_the_current_one():
    async def scenario():
        house = House()
        run_id = await house.begin()
        waiting = asyncio.ensure_future(house.controller.next_items(run_id, 0, 0))
        await asyncio.sleep(1)
        await house.controller.abort(run_id, "nobody could load the weights")
        assert await ends_with(waiting, WorkerError) == "nobody could load the weights"
        await house.controller.heard(run_id)

    run(scenario())


def test_epochs_and_leases_of_a_later_controller_are_never_those_of_an_earlier_one():
    async def scenario():
        found = []
        for _ in range(2):
            house = House()
            run_id = await house.begin()
            await house.join("engine", "verifier")
            async with house.controller.registry_of("verifier").lease(1.0, timeout_s=5.0) as lease:
                found.append((run_id.epoch, lease.lease_id))
        assert all(later > earlier for earlier, later in zip(*found, strict=True))

    run(scenario())


def test_all_workers_of_a_teacher_are_one_model_while_a_run_or_a_worker_of_it_lives():
    async def scenario():
        house = House()

        async def refused():
            why = await ends_with(house.join("other", model_hash="2" * 64), ConfigError)
            assert "every teacher:math worker must serve the same model: " in why
            assert f"worker second has the sha256 {'1' * 12}, got model with {'2' * 12}: " in why
            assert why.endswith("start it with the same --model-path, or under another --name")

        await house.join("first", model_hash="1" * 64)
        await house.join("second", model_hash="1" * 64)
        await house.join("another name", teacher("code"), model_hash="2" * 64)
        await refused()
        assert len(await house.controller.members(MATH)) == 2
        run_id = await house.begin()
        for name in ("first", "second"):
            await house.controller.deregister(MATH, name)
        why = await ends_with(house.join("other", model_hash="2" * 64), ConfigError)
        assert "worker second has the sha256 111" in why  # the run learns from it still
        await house.controller.end_run(run_id)
        await house.join("other", model_hash="2" * 64)
        why = await ends_with(house.join("first", model_hash="1" * 64), ConfigError)
        assert "worker other has the sha256 222" in why

    run(scenario())
