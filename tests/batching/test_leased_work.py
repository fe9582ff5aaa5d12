"""Work on workers that die, freeze and are fenced: what is tried again, how often, and why."""

import asyncio

import pytest
from scripted import Registry, run
from scripted_run import make_config, make_plan

from async_grpo.batching.failures import QUARANTINE, Quarantine, SlotFailed
from async_grpo.batching.leased_work import AFTER_LOSS_S, Attempts, LeasedWork
from async_grpo.batching.pipeline import SlotPipeline
from async_grpo.config.roles import ENVIRONMENT, GENERATION
from async_grpo.types import WeightsVersion
from async_grpo.util.errors import (
    LeaseLost,
    LossCause,
    ProcessLostError,
    StaleAnswerError,
    WorkerError,
)

VERSION = WeightsVersion(0, 0)
TIMEOUT_S = 900.0


class Desk:
    """Leased work over scripted workers, and the reasons of its retries."""

    def __init__(self, *workers):
        self.registry = Registry(*workers)
        self.reasons = []
        plan = make_plan(make_config(stall_timeout_s=TIMEOUT_S))
        self.pipeline = SlotPipeline(plan, {GENERATION: self.registry}.__getitem__)
        self.quarantine = self.pipeline.workers.quarantine

    async def do(self, slot=0):
        work = LeasedWork(
            role=GENERATION,
            method="answer",
            request=slot,
            cost=1,
            version=VERSION,
            slot=slot,
            on_retry=self.reasons.append,
        )
        return await self.pipeline.workers.answer(work)


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
    assert run(desk.do()) == "good"
    assert desk.reasons == [reason]
    assert not desk.registry.open


def test_a_frozen_worker_holds_a_slot_only_until_its_lease_ends():
    frozen = Player("zombie", seconds=10 * TIMEOUT_S)
    desk = Desk(frozen, Player("good"))

    async def scenario():
        asyncio.get_running_loop().call_later(30.0, desk.registry.revoke, 0)
        return await desk.do(), now()

    answer, seconds = run(scenario())
    assert answer == "good"
    assert seconds == pytest.approx(30.0 + AFTER_LOSS_S + 1.0)
    assert desk.reasons == ["lease revoked"]
    assert frozen.cancelled == 1


def test_a_lease_without_tokens_is_given_up_in_the_worker_and_uses_up_a_try():
    desk = Desk(Player("late", seconds=10 * TIMEOUT_S))

    async def scenario():
        for number in range(3):
            asyncio.get_running_loop().call_later(
                100.0 * (number + 1), desk.registry.revoke, number, LossCause.STALLED, "stalled"
            )
        with pytest.raises(SlotFailed, match=r"3 times, the last time: lease 2 has ended: stal"):
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
    """Their calls fail one after the other; the first one tells."""
    dying, well = Player(FAULTS["worker died"], "good", seconds=3.0), Player("good", seconds=9.0)
    slow = Player("zombie", seconds=9.0)

    class Two:
        async def answer(self, slot):
            return await (dying if slot == 0 else slow).answer(slot)

    desk = Desk(Two(), well, Two(), well)
    desk.registry.name = lambda number: f"w{number % 2}"  # w0 and w2 are one worker here

    async def scenario():
        slots = [asyncio.ensure_future(desk.do(slot)) for slot in range(3)]
        await asyncio.sleep(3.5)
        deaths = [desk.quarantine._deaths.get(slot, 0) for slot in range(3)]
        for slot in slots:
            slot.cancel()
        return deaths

    assert run(scenario()) == [1, 0, 1]


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


def test_a_slot_that_is_cancelled_gives_its_lease_back_and_ends_the_work():
    desk = Desk(Player("late", seconds=50.0))

    async def scenario():
        slot = asyncio.ensure_future(desk.do())
        await asyncio.sleep(1.0)
        assert set(desk.registry.open) == {0}
        slot.cancel()
        await asyncio.gather(slot, return_exceptions=True)

    run(scenario())
    assert not desk.registry.open
    assert desk.registry.workers[0].cancelled == 1


def test_a_group_of_episodes_is_played_again_once_after_a_death_and_alone_then():
    """A neighbour that kills its worker again is not there."""
    quarantine, lost = Quarantine(), LeaseLost(LossCause.DIED, "killed")
    attempts = Attempts(ENVIRONMENT, "slot", quarantine)
    assert attempts.pause_after(lost)[0] == "worker died"
    assert quarantine.is_on_probation("slot")
    with pytest.raises(SlotFailed) as caught:
        attempts.pause_after(lost)
    assert caught.value.stage == QUARANTINE
