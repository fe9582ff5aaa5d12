"""Who is quarantined when workers die: the question that kills them, and nobody who stood by.

Real slots and a real registry on simulated workers: least-loaded leases, requests side by side,
deaths that take all requests of a worker along and are heard of late, workers that come back.
"""

import asyncio
import random

import pytest
from effort import histories
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import Handle, run
from scripted_run import make_config, make_plan

from async_grpo.batching.failures import QUARANTINE, QUARANTINE_DEATHS, Quarantine, SlotFailed
from async_grpo.batching.leased_work import LeasedWork
from async_grpo.batching.pipeline import SlotPipeline
from async_grpo.config.roles import ENVIRONMENT, GENERATION, role_of
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.types import Pulse, WorkerInfo
from async_grpo.util.errors import ProcessLostError


class Body:
    """One life of a worker."""

    def __init__(self, fleet, worker_id):
        self.fleet, self.worker_id = fleet, worker_id
        self.death = asyncio.get_running_loop().create_future()

    async def answer(self, slot):
        fleet = self.fleet
        own = asyncio.ensure_future(asyncio.sleep(fleet.random.uniform(0.1, 8.0)))
        await asyncio.wait({own, self.death}, return_when=asyncio.FIRST_COMPLETED)
        if slot in fleet.killers and not self.death.done():
            fleet.kill(self)
        if self.death.done():
            await asyncio.sleep(fleet.random.uniform(0.0, fleet.rumour_s))
            raise ProcessLostError("segmentation fault")
        return slot

    async def ping(self, after_s=0.0):
        await asyncio.wait({self.death}, timeout=after_s)
        if self.death.done():
            await asyncio.sleep(self.fleet.random.uniform(0.0, self.fleet.missed_s))
            raise ProcessLostError("its ping came to nothing")
        return Pulse("none")


class Fleet:
    """Workers of one registry, each replaced after a while."""

    def __init__(self, *, num_workers, killers, rumour_s, missed_s, back_s, seed):
        self.killers, self.back_s = killers, back_s
        self.rumour_s, self.missed_s = rumour_s, missed_s
        self.random = random.Random(seed)
        self.num_workers, self.num_lives, self.num_deaths = num_workers, 0, 0
        # The weights of this role are none: it needs no publication.
        self.registry = WorkerRegistry(role_of(ENVIRONMENT), kill=self.fenced)

    async def join(self):
        self.num_lives += 1
        name = f"w{self.num_lives}"
        info = WorkerInfo(name, ENVIRONMENT, "node", 1, "model", 64, 100.0, 0.0, 512)
        await self.registry.register(info, Handle(Body(self, name)))

    def kill(self, body):
        self.num_deaths += 1
        body.death.set_result(None)

    def fenced(self, handle):
        async def come_back():
            await asyncio.sleep(self.back_s)
            await self.join()

        self.coming = asyncio.ensure_future(come_back())


async def outcomes(num_slots, **options):
    """(what became of each slot, the fleet, the quarantine, the retries of each slot)."""
    fleet = Fleet(**options)
    for _ in range(fleet.num_workers):
        await fleet.join()
    plan = make_plan(make_config(stall_timeout_s=900.0))
    pipeline = SlotPipeline(plan, {GENERATION: fleet.registry}.__getitem__)
    retries = {slot: [] for slot in range(num_slots)}

    async def slot_of(slot):
        await asyncio.sleep(fleet.random.uniform(0.0, 10.0))
        work = LeasedWork(
            role=GENERATION,
            method="answer",
            request=slot,
            cost=1,
            slot=slot,
            on_retry=retries[slot].append,
        )
        return await pipeline.workers.answer(work)

    found = await asyncio.gather(*map(slot_of, range(num_slots)), return_exceptions=True)
    return found, fleet, pipeline.workers.quarantine, retries


worlds = st.fixed_dictionaries(
    {
        "num_workers": st.integers(1, 4),
        "rumour_s": st.sampled_from([0.0, 0.01, 1.0]),
        "missed_s": st.sampled_from([0.0, 0.1, 6.0]),
        "back_s": st.sampled_from([0.5, 20.0]),
        "seed": st.integers(0, 10**6),
    }
)


@settings(max_examples=histories(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(worlds, st.integers(1, 24), st.data())
def test_of_all_questions_exactly_the_one_that_kills_is_quarantined(world, num_slots, data):
    killer = data.draw(st.integers(0, num_slots - 1))
    found, fleet, _, retries = run(outcomes(num_slots, killers={killer}, **world), limit_s=100_000)
    assert [slot for slot, outcome in enumerate(found) if outcome != slot] == [killer]
    assert isinstance(found[killer], SlotFailed)
    assert found[killer].stage == QUARANTINE
    assert fleet.num_deaths == QUARANTINE_DEATHS
    assert {reason for own in retries.values() for reason in own} <= {"worker died"}


@settings(max_examples=histories(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(worlds, st.integers(4, 24), st.data())
def test_several_killers_are_all_found(world, num_slots, data):
    """Each costs at most three workers; some who stood by may be taken for one of them."""
    killers = data.draw(st.sets(st.integers(0, num_slots - 1), min_size=2, max_size=4))
    found, fleet, _, _ = run(outcomes(num_slots, killers=killers, **world), limit_s=100_000)
    failed = {slot for slot, outcome in enumerate(found) if outcome != slot}
    assert killers <= failed
    assert fleet.num_deaths <= QUARANTINE_DEATHS * len(killers)


@pytest.mark.parametrize("num_slots", [1, 24])
def test_without_a_killer_nobody_is_suspected(num_slots):
    options = {"num_workers": 2, "rumour_s": 0.0, "missed_s": 0.0, "back_s": 0.0, "seed": 1}
    found, _, quarantine, retries = run(outcomes(num_slots, killers=(), **options))
    assert found == list(range(num_slots))
    assert not quarantine._deaths and not any(retries.values())


def test_questions_stay_excluded_and_slots_are_forgotten():
    quarantine = Quarantine((7, 3))
    quarantine.questions.add(5)
    assert quarantine.questions == {3, 5, 7}
    for _ in range(QUARANTINE_DEATHS - 1):
        quarantine.died("slot")
    quarantine.forget("slot")
    assert not quarantine.is_on_probation("slot")
    assert not quarantine.died("slot"), "its deaths of before count no more"
