"""Work on workers that die, freeze and are fenced, handed out by registries that die too."""

import asyncio

import pytest
from scripted import Handle, Registry, run

from async_grpo import cluster
from async_grpo.batching.leased_work import (
    AFTER_LOSS_S,
    MISSED_TIMEOUT_S,
    QUARANTINE,
    LeasedWork,
    Progress,
    SlotFailed,
)
from async_grpo.batching.quarantine import Quarantine
from async_grpo.batching.services import Service
from async_grpo.errors import (
    ClusterError,
    ProcessLostError,
    StaleAnswerError,
    WorkerError,
)
from async_grpo.types import WeightsVersion

VERSION = WeightsVersion(0, 0)
TIMEOUT_S = 900.0


class Desk:
    """The leased work of one role over scripted workers, and the reasons of its retries."""

    def __init__(self, *workers, registry=None):
        self.registry = registry or Registry(*workers)
        self.reasons, self.quarantine, self.progress = [], Quarantine(), Progress()
        self.service = Service.registry("generation", Handle(self.registry))
        self.work = LeasedWork(
            self.service,
            stage="generation",
            timeout_s=TIMEOUT_S,
            progress=self.progress,
            quarantine=self.quarantine,
        )

    async def do(self, slot=0):
        return await self.work.do(
            lambda lease: lease.handle.answer.remote(slot),
            cost=1,
            version=VERSION,
            slot=slot,
            on_retry=self.reasons.append,
        )


class Player:
    """A worker that answers what a test scripts, one entry a request."""

    def __init__(self, *answers, seconds=1.0):
        self.answers, self.seconds, self.cancelled = list(answers), seconds, 0

    async def answer(self, slot):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer


def now():
    return asyncio.get_running_loop().time()


FAULTS = {
    "worker died": ProcessLostError("gone"),
    "stale answer": StaleAnswerError("old"),
    "worker error": WorkerError("broken"),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_try_whose_answer_cannot_be_used_is_told_by_its_reason(reason):
    desk = Desk(Player(FAULTS[reason]), Player("good"))
    if reason == "worker died":
        desk.registry.ended[0] = done_after(2.0)
    assert run(desk.do()) == "good"
    assert desk.reasons == [reason]
    assert not desk.registry.open


def test_a_frozen_worker_holds_a_slot_only_until_its_lease_is_revoked():
    frozen = Player("zombie", seconds=10 * TIMEOUT_S)
    desk = Desk(frozen, Player("good"))

    async def scenario():
        asyncio.get_running_loop().call_later(
            30.0, desk.registry.revoke, 0, "no sign of life for 30 s"
        )
        return await desk.do(), now()

    answer, seconds = run(scenario())
    assert answer == "good"
    assert seconds == pytest.approx(30.0 + AFTER_LOSS_S + 1.0)
    assert desk.reasons == ["lease revoked"]
    assert frozen.cancelled == 1


def test_a_lease_without_tokens_is_given_up_in_the_worker_and_uses_up_a_try():
    desk = Desk(Player("late", seconds=10 * TIMEOUT_S))

    async def scenario():
        for lease_id in range(3):
            asyncio.get_running_loop().call_later(
                100.0 * (lease_id + 1), desk.registry.revoke, lease_id, "stalled: no token came"
            )
        with pytest.raises(SlotFailed, match=r"3 times, .*w0 stalled: no token came \(--stall-t"):
            await desk.do()

    run(scenario())
    assert desk.reasons == ["stalled"] * 2  # the last samples have failed
    assert desk.registry.workers[0].cancelled == 3


def test_the_answer_of_a_lease_that_ended_meanwhile_is_refused():
    desk = Desk(Player("zombie"), Player("good"))
    desk.registry.revoked.add(0)
    assert run(desk.do()) == "good"
    assert desk.reasons == ["lease revoked"]


def test_one_death_is_one_death_for_everybody_who_was_there_and_for_nobody_else():
    """The registry tells the others of their revocation before they have heard of the death."""
    dying, well = Player(FAULTS["worker died"], "good", seconds=3.0), Player("good", seconds=9.0)
    slow = Player("zombie", seconds=9.0)

    class Two:
        async def answer(self, slot):
            return await (dying if slot == 0 else slow).answer(slot)

    desk = Desk(Two(), well, Two(), well)
    for lease_id in (0, 2):  # w0 and w2 are one worker here
        desk.registry.ended[lease_id] = done_after(3.5)
    desk.registry.name = lambda number: f"w{number % 2}"

    async def scenario():
        slots = [asyncio.ensure_future(desk.do(slot)) for slot in range(3)]
        await asyncio.sleep(4.0)
        deaths = [desk.quarantine._deaths.get(slot, 0) for slot in range(3)]
        for slot in slots:
            slot.cancel()
        return deaths

    assert run(scenario()) == [1, 0, 1]


def test_who_is_sent_to_a_worker_that_is_dead_already_was_not_there_when_it_died():
    desk = Desk(Player(FAULTS["worker died"], seconds=0.0))
    for lease_id in range(2):
        desk.registry.ended[lease_id] = done_after(5.0 - lease_id)

    async def scenario():
        slots = [asyncio.ensure_future(desk.do(0))]
        await asyncio.sleep(1.0)
        slots.append(asyncio.ensure_future(desk.do(1)))
        await asyncio.sleep(4.5)  # both have heard that the registry has missed it
        deaths = [desk.quarantine._deaths.get(slot, 0) for slot in range(2)]
        for slot in slots:
            slot.cancel()
        return deaths

    assert run(scenario()) == [1, 0]
    assert desk.reasons == ["worker died"] * 2


def test_a_death_that_the_registry_tells_first_is_a_death():
    desk = Desk(Player("late", seconds=500.0), Player("good"))

    async def scenario():
        asyncio.get_running_loop().call_later(3.0, desk.registry.revoke, 0, "died: its ping failed")
        return await desk.do(), desk.reasons, now()

    answer, reasons, seconds = run(scenario())
    assert (answer, reasons) == ("good", ["worker died"])
    assert seconds == pytest.approx(3.0 + AFTER_LOSS_S + 1.0)


def done_after(seconds):
    class Later:
        def __await__(self):
            return asyncio.sleep(seconds, "it died").__await__()

    return Later()


def test_a_dead_worker_is_asked_again_only_when_its_registry_has_missed_it():
    desk = Desk(Player(FAULTS["worker died"], "good"))
    asked = []
    acquire = desk.registry.acquire

    async def timed(*arguments):
        asked.append(now())
        return await acquire(*arguments)

    desk.registry.acquire = timed
    desk.registry.ended[0] = done_after(5.0)
    run(desk.do())
    assert asked == [0.0, pytest.approx(5.0 + AFTER_LOSS_S)]


def test_a_registry_that_never_misses_a_dead_worker_is_not_waited_for():
    desk = Desk(Player(FAULTS["worker died"]), Player("good"))

    async def scenario():
        return await desk.do(), now()

    assert run(scenario())[1] == pytest.approx(1.0 + MISSED_TIMEOUT_S + AFTER_LOSS_S + 1.0)


def test_deaths_use_up_no_try_and_the_third_one_is_the_last():
    faults = [WorkerError("broken"), FAULTS["worker died"], WorkerError("broken")]
    desk = Desk(Player(*faults, FAULTS["worker died"], "good"))
    assert run(desk.do()) == "good"
    assert desk.reasons == ["worker error", "worker died", "worker error", "worker died"]
    desk = Desk(Player(FAULTS["worker died"]))
    with pytest.raises(SlotFailed, match="workers keep dying of it") as caught:
        run(desk.do())
    assert caught.value.stage == QUARANTINE
    assert desk.reasons == ["worker died"] * 2  # the last samples have failed


def test_a_slot_that_is_cancelled_gives_its_lease_back():
    desk = Desk(Player("late", seconds=50.0))

    async def scenario():
        slot = asyncio.ensure_future(desk.do())
        await asyncio.sleep(1.0)
        assert desk.registry.open == {0}
        slot.cancel()
        await asyncio.gather(slot, return_exceptions=True)

    run(scenario())
    assert not desk.registry.open


class Mortal(Registry):
    """A registry whose process is lost between two moments; it comes back knowing no lease."""

    def __init__(self, *workers, lost=(0.0, 0.0)):
        super().__init__(*workers)
        self.lost = lost
        self.forgotten = set()

    def check(self):
        first, last = self.lost
        if first <= now() < last:
            self.forgotten |= self.open
            self.open.clear()
            raise ProcessLostError("the registry died")

    async def acquire(self, *arguments):
        self.check()
        return await super().acquire(*arguments)

    async def until_revoked(self, lease_id):
        return await asyncio.sleep(10 * TIMEOUT_S)

    async def release(self, lease_id):
        self.check()
        if lease_id in self.forgotten:
            return False
        return await super().release(lease_id)


@pytest.fixture
def found(monkeypatch):
    """What is found under each name; nothing, at first."""
    actors = {}
    monkeypatch.setattr(cluster, "find_actor", actors.get)
    return actors


@pytest.mark.parametrize("lost", [(0.0, 20.0), (0.5, 20.0), (0.5, 0.9)])
def test_work_survives_a_registry_that_is_restarted(lost, found):
    """Before a lease is asked for, while it is worked on, and within that time."""
    desk = Desk(registry=Mortal(Player("good"), lost=lost))

    async def scenario():
        if lost == (0.5, 0.9):
            asyncio.get_running_loop().call_later(0.6, suppressed, desk.registry.check)
        return await desk.do(), now()

    answer, seconds = run(scenario())
    assert answer == "good"
    assert desk.reasons == ([] if lost[0] == 0.0 else ["lease revoked"])
    assert seconds < 20.0 + 5.0 + 2.0 + AFTER_LOSS_S
    assert not desk.registry.open
    assert (desk.service.num_retries > 0) == (lost[1] > 2.0)


class FrozenOnce(Registry):
    """Does not answer when the first lease is given back, and is not heard of again for an hour."""

    num_silences = 0

    async def release(self, lease_id):
        if not self.num_silences:
            self.num_silences += 1
            await asyncio.sleep(3600)
        return await super().release(lease_id)


def test_a_registry_that_is_silent_at_a_release_loses_the_answer_and_not_the_work(found):
    desk = Desk(registry=FrozenOnce(Player("first", "second")))
    assert run(desk.do()) == "second"
    assert desk.reasons == ["lease revoked"]


def suppressed(check):
    with pytest.raises(ProcessLostError):
        check()


def test_a_registry_made_anew_is_found_by_its_name(found):
    dead, heir = Mortal(lost=(0.0, float("inf"))), Registry(Player("good"))
    desk = Desk(registry=dead)

    async def scenario():
        asyncio.get_running_loop().call_later(
            7.0, found.__setitem__, "registry-generation", Handle(heir)
        )
        return await desk.do(), now()

    answer, seconds = run(scenario())
    assert answer == "good"
    assert 7.0 < seconds < 7.0 + 5.0 + 1.5
    assert len(heir.asked) == 1


def test_a_registry_that_stays_away_is_named_at_the_deadline(found):
    desk = Desk(registry=Mortal(lost=(0.0, float("inf"))))

    async def scenario():
        with pytest.raises(ClusterError, match="the generation registry was lost, and nothing"):
            await desk.do()
        return now()

    assert run(scenario()) == pytest.approx(TIMEOUT_S, abs=6.0)


def test_a_registry_that_is_lost_revokes_what_it_had_leased(found):
    """The end of a lease is heard from the loss of its registry, long before any answer."""
    desk = Desk(registry=Mortal(Player("late", seconds=500.0), lost=(3.0, 4.0)))

    async def until_revoked(lease_id):
        await asyncio.sleep(3.0 if lease_id == 0 else 10 * TIMEOUT_S)
        raise ProcessLostError("the registry died")

    desk.registry.until_revoked = until_revoked

    async def scenario():
        return await desk.do(), now()

    assert run(scenario())[1] == pytest.approx(3.0 + AFTER_LOSS_S + 500.0, abs=2.0)
    assert desk.reasons == ["lease revoked"]
