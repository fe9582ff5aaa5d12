"""Who is quarantined when workers die: the question that kills them, and nobody who stood by.

Real slots on simulated workers: least-loaded leases, requests side by side, deaths that take all
requests of a worker along, registries that miss them late, and workers that come back.
"""

import asyncio
import random

import pytest
from effort import histories
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import Handle, run

from async_grpo.batching.leased_work import QUARANTINE, LeasedWork, Progress, SlotFailed
from async_grpo.batching.quarantine import QUARANTINE_DEATHS, Quarantine
from async_grpo.batching.services import Service
from async_grpo.errors import ProcessLostError
from async_grpo.types import Lease, WeightsVersion


class Body:
    """One life of a worker."""

    def __init__(self, fleet, worker_id):
        self.fleet, self.worker_id, self.load = fleet, worker_id, 0
        self.death = asyncio.get_running_loop().create_future()
        self.missed = asyncio.get_running_loop().create_future()

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


class Fleet:
    """A registry and its workers, without deadlines."""

    def __init__(self, *, num_workers, killers, rumour_s, missed_s, back_s, seed):
        self.killers, self.back_s = killers, back_s
        self.rumour_s, self.missed_s = rumour_s, missed_s
        self.random = random.Random(seed)
        self.bodies = [Body(self, f"w{number}") for number in range(num_workers)]
        self.leases, self.num_deaths = {}, 0

    def kill(self, body):
        self.num_deaths += 1
        body.death.set_result(None)
        loop = asyncio.get_running_loop()
        loop.call_later(self.random.uniform(0.0, self.missed_s), self.miss, body)

    def miss(self, body):
        self.bodies.remove(body)
        body.missed.set_result(None)
        loop = asyncio.get_running_loop()
        loop.call_later(self.back_s, lambda: self.bodies.append(Body(self, body.worker_id)))

    async def acquire(self, cost, version, timeout_s):
        while not self.bodies:  # noqa: ASYNC110  time is what a test moves
            await asyncio.sleep(0.5)
        body = min(self.bodies, key=lambda body: body.load)  # a dead one has the least to do
        lease_id = len(self.leases)
        self.leases[lease_id] = body
        body.load += cost
        return Lease(lease_id, body.worker_id, Handle(body), cost, version)

    async def until_revoked(self, lease_id):
        await asyncio.shield(self.leases[lease_id].missed)
        return "died: its ping came to nothing"

    async def release(self, lease_id):
        body = self.leases[lease_id]
        body.load -= 1
        return not body.missed.done()


async def outcomes(num_slots, **options):
    """(what became of each slot, the fleet, the quarantine, the retries of each slot)."""
    fleet, quarantine = Fleet(**options), Quarantine()
    work = LeasedWork(
        Service.registry("generation", Handle(fleet)),
        stage="generation",
        timeout_s=900.0,
        progress=Progress(),
        quarantine=quarantine,
    )
    retries = {slot: [] for slot in range(num_slots)}

    async def slot_of(slot):
        await asyncio.sleep(fleet.random.uniform(0.0, 10.0))
        return await work.do(
            lambda lease: lease.handle.answer.remote(slot),
            cost=1,
            version=WeightsVersion(0, 0),
            slot=slot,
            on_retry=retries[slot].append,
        )

    found = await asyncio.gather(*map(slot_of, range(num_slots)), return_exceptions=True)
    return found, fleet, quarantine, retries


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
    assert not quarantine.num_suspects and not any(retries.values())


def test_questions_stay_excluded_and_slots_are_forgotten():
    quarantine = Quarantine((7, 3))
    quarantine.exclude(5)
    assert quarantine.questions == (3, 5, 7)
    assert 5 in quarantine and 4 not in quarantine
    for _ in range(QUARANTINE_DEATHS - 1):
        quarantine.died("slot")
    quarantine.forget("slot")
    assert not quarantine.is_on_probation("slot") and quarantine.num_suspects == 0
