"""Engines that die at random choose no lengths: what they have sampled goes on elsewhere."""

import asyncio
import contextlib
from dataclasses import dataclass, field, replace

import numpy as np
from scripted import Handle, run
from staged import OLDEST, QUESTION, REQUEST, SCORED, Stage, make_books

from async_grpo.batching.losses import Members
from async_grpo.config.roles import role_of
from async_grpo.controller.leases import Lease
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.types import (
    Cut,
    Pulse,
    RequestPulse,
    Turn,
    VersionSpan,
    WeightsAck,
    WeightsSnapshot,
    WorkerInfo,
)
from async_grpo.util.errors import ProcessLostError

TOKENS_A_SECOND = 10.0
PING_S = 1.0
MEANS = (10.0, 300.0)  # tokens of a short and of a long output: what it is its first token says
SHARE_OF_LONG = 0.1
GROUP = 4
NUM_SEATS = 8
NUM_ENGINES = 4
CONTRACT = replace(REQUEST.sampling, max_tokens=100_000)


@dataclass
class Flight:
    """A request under way; its tokens come at even steps, and each output has an end."""

    request: object
    random: np.random.Generator
    began_s: float
    told: list[int] = field(default_factory=list)
    num_cuts: int = 0

    def __post_init__(self):
        self.told = [0] * self.request.num_samples
        self.begun = self.request.begun or [None] * self.request.num_samples
        self.kinds = [
            int(turn.token_ids[0]) if turn and len(turn.token_ids) else self._kind()
            for turn in self.begun
        ]
        self.lengths = [  # of what is still to come; without memory, given the kind
            0 if turn and turn.is_finished else int(self.random.geometric(1 / MEANS[kind]))
            for turn, kind in zip(self.begun, self.kinds, strict=True)
        ]

    def _kind(self):
        return int(self.random.random() < SHARE_OF_LONG)

    @property
    def seconds(self):
        return max(self.lengths) / TOKENS_A_SECOND

    def sampled(self, now_s):
        steps = int(TOKENS_A_SECOND * (now_s - self.began_s))
        return [min(length, steps) for length in self.lengths]

    def cut(self, now_s):
        parts = []
        for index, num in enumerate(self.sampled(now_s)):
            is_finished = num == self.lengths[index]
            parts.append(turn(self.kinds[index], num - self.told[index], is_finished=is_finished))
            self.told[index] = num
        self.num_cuts += 1
        return Cut(self.num_cuts - 1, tuple(parts))

    def answer(self):
        return tuple(
            turn(kind, (len(begun.token_ids) if begun else 0) + length)
            for kind, begun, length in zip(self.kinds, self.begun, self.lengths, strict=True)
        )


def turn(kind, length, *, is_finished=True):
    return Turn(
        np.full(length, kind, np.int32),
        np.zeros(length, np.float32),
        (VersionSpan(OLDEST, 0, length),) if length else (),
        "stop" if is_finished else "unfinished",
        "",
    )


@dataclass
class Engine:
    name: str
    random: np.random.Generator
    tells: bool
    flights: dict = field(default_factory=dict)

    def __post_init__(self):
        self.dead = asyncio.Event()

    async def _live(self, seconds):
        try:
            async with asyncio.timeout(seconds):
                await self.dead.wait()
        except TimeoutError:
            return
        raise ProcessLostError(f"{self.name} died")

    async def ping(self, after_s=0.0):
        await self._live(after_s)
        requests = {}
        for lease_id, flight in self.flights.items():
            cut = flight.cut(now_s()) if self.tells and flight.request.with_cuts else None
            requests[lease_id] = RequestPulse(sum(flight.sampled(now_s())), False, cut)
        return Pulse("served", int(now_s() * 1000), requests)

    async def generate(self, request):
        flight = self.flights[request.lease_id] = Flight(request, self.random, now_s())
        try:
            await self._live(flight.seconds)
            return flight.answer()
        finally:
            del self.flights[request.lease_id]

    async def load_weights(self, snapshot):
        return WeightsAck(self.name, snapshot.version, 0.0, 0.0)

    async def abort_all(self):
        pass


def now_s():
    return asyncio.get_running_loop().time()


class Fleet:
    """Engines, each of which is replaced when it dies, and the lengths that come of many groups."""

    def __init__(self, *, tells, lives_s=None, seed=0):
        self.random = np.random.default_rng(seed)
        self.tells, self.lives_s = tells, lives_s
        self.stage = Stage()
        self.registry = WorkerRegistry(
            role_of("generation"), kill=lambda handle: None, ping_interval_s=PING_S
        )
        self.stage.pipeline.workers._registry_of = lambda role: self.registry
        # These engines die of themselves, so often that every question would be suspected.
        self.stage.pipeline.workers.quarantine.died = lambda slot, weight=1: False
        self.num_deaths = 0
        self.accounts = []
        self.graded, self.num_late = [], 0

    async def _join(self, name):
        engine = Engine(name, self.random, self.tells)
        info = WorkerInfo(name, "generation", "node", 1, "m", 64, NUM_SEATS, 0.0, 10**6)
        await self.registry.register(info, Handle(engine))
        return engine

    async def _place(self, number):
        """One engine after the other."""
        for generation in range(10**6):
            engine = await self._join(f"e{number}-{generation}")
            if self.lives_s is None:
                return
            await asyncio.sleep(self.random.exponential(self.lives_s))
            engine.dead.set()
            self.num_deaths += 1

    async def generate(self, request, account):
        """The turns of one group; its outputs are graded as they end."""

        async def grade(requests):
            self.graded += requests
            await asyncio.sleep(0)
            return SCORED[:1] * len(requests)

        with contextlib.closing(Members(request, QUESTION, account, grade)) as members:
            turns = await self.stage.pipeline._generate(members, OLDEST)
            early = len(self.graded)
            assert len(await members.verdicts(turns)) == len(turns)
            self.num_late += len(self.graded) - early
            return turns

    async def sample(self, num_groups):
        """The turns of all groups, and the seconds that they took."""
        places = [asyncio.create_task(self._place(number)) for number in range(NUM_ENGINES)]
        await asyncio.sleep(0.1)
        await self.registry.publish(WeightsSnapshot(OLDEST, ()), timeout_s=60.0)
        room, began_s = asyncio.Semaphore(4 * NUM_ENGINES * NUM_SEATS // GROUP), now_s()

        async def group(number):
            request = replace(REQUEST, ordinal=number, num_samples=GROUP, sampling=CONTRACT)
            account = make_books(request)
            self.accounts.append(account)
            async with room:
                return await self.generate(request, account)

        turns = await asyncio.gather(*(group(number) for number in range(num_groups)))
        for place in places:
            place.cancel()
        return [turn for group in turns for turn in group], now_s() - began_s


def share_of_long(turns):
    """The share of long outputs among all, and its standard error without any selection."""
    share = np.mean([turn.token_ids[0] for turn in turns])
    return share, np.sqrt(SHARE_OF_LONG * (1 - SHARE_OF_LONG) / len(turns))


NUM_GROUPS = 900
LIVES_S = 60.0  # of an engine; a group with a long output takes 30 s


def sampled(*, tells, lives_s=None, num_groups=NUM_GROUPS):
    fleet = Fleet(tells=tells, lives_s=lives_s)
    turns, seconds = run(fleet.sample(num_groups), limit_s=10**6)
    return fleet, turns, seconds


def test_with_cuts_engines_that_die_at_random_do_not_move_the_lengths():
    fleet, turns, _ = sampled(tells=True, lives_s=LIVES_S)
    share, error = share_of_long(turns)
    assert fleet.num_deaths > 20
    assert abs(share - SHARE_OF_LONG) < 3 * error
    lengths = [len(turn.token_ids) for turn in turns]
    mean = MEANS[0] * (1 - SHARE_OF_LONG) + MEANS[1] * SHARE_OF_LONG
    spread = np.sqrt(2 * sum(s * m**2 for s, m in zip((0.9, 0.1), MEANS, strict=True)) - mean**2)
    assert abs(np.mean(lengths) - mean) < 3 * spread / np.sqrt(len(lengths))
    continued = sum(bool(account.continued) for account in fleet.accounts)
    again = sum(bool(account.resampled) for account in fleet.accounts)
    assert continued > 5 * again  # those that were lost before their first cut


def test_without_cuts_groups_that_are_sampled_again_prefer_short_outputs_and_are_counted():
    fleet, turns, _ = sampled(tells=False, lives_s=LIVES_S)
    share, error = share_of_long(turns)
    assert share < SHARE_OF_LONG - 3 * error
    assert not any(account.continued for account in fleet.accounts)
    assert sum(bool(account.resampled) for account in fleet.accounts) > NUM_GROUPS / 20


def test_places_of_outputs_that_have_ended_are_taken_by_others():
    _, _, before = sampled(tells=False, num_groups=300)
    _, _, after = sampled(tells=True, num_groups=300)
    assert after < 0.6 * before


def test_what_a_group_had_at_the_last_cut_is_kept_and_the_rest_counts_as_lost():
    fleet = Fleet(tells=True)

    async def scenario():
        first = await fleet._join("first")
        await fleet.registry.publish(WeightsSnapshot(OLDEST, ()), timeout_s=60.0)
        account = make_books(replace(REQUEST, num_samples=GROUP))
        request = replace(REQUEST, num_samples=GROUP, sampling=CONTRACT)
        asking = asyncio.create_task(fleet.generate(request, account))
        await asyncio.sleep(0)
        while not first.flights:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (flight,) = first.flights.values()
        flight.kinds, flight.lengths = [0, 1, 0, 1], [15, 900, 5, 800]
        await asyncio.sleep(3.5 * PING_S)
        (lease,) = fleet.registry.members[0].leases.values()
        assert lease.cost == 2  # of four
        kept = [sum(len(cut.parts[i].token_ids) for cut in lease.cuts) for i in range(GROUP)]
        second = await fleet._join("second")
        first.dead.set()
        while not second.flights:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (flight,) = second.flights.values()
        begun = [len(turn.token_ids) for turn in flight.request.begun]
        turns = await asking
        return kept, begun, flight, turns, account, fleet.registry.take_lost()

    kept, begun, flight, turns, account, lost = run(scenario())
    assert begun == kept and kept[0] == 15 and kept[2] == 5
    assert [turn.is_finished for turn in flight.request.begun] == [True, False, True, False]
    assert [len(turn.token_ids) for turn in turns] == [
        num + more for num, more in zip(begun, flight.lengths, strict=True)
    ]
    # Each output was graded once: when it ended, or with the last.
    assert sorted(len(asked.completion.token_ids) for asked in fleet.graded) == sorted(
        map(len_of, turns)
    )
    assert fleet.num_late < GROUP
    assert dict(account.continued) == {"worker died": 1} and not account.resampled
    assert account.ledger.tokens_in_flight(account.ordinal) == sum(map(len_of, turns))
    assert lost["lost_tokens_died"] == 0  # those since the last pulse are known to nobody


def len_of(turn):
    return len(turn.token_ids)


def test_a_cut_after_a_missed_one_is_not_gone_on_from():
    async def scenario():
        info = WorkerInfo("w", "generation", "node", 1, "m", 64, 8.0, 0.0, 64)
        lease = Lease(0, info, None, 4.0, None)
        for number in (0, 2):
            lease.heard(RequestPulse(7 + number, False, Cut(number, (turn(0, 5),))))
        return lease

    lease = run(scenario())
    assert [cut.number for cut in lease.cuts] == [0]
    assert lease.num_tokens == 2  # of 9, of which 7 are in the cut
