"""Engines that die at random choose no lengths: what they have sampled goes on elsewhere."""

import asyncio
import contextlib
import gc
import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from scripted import Handle, Registry, make_verdict, run
from staged import NEWER, OLDEST, QUESTION, REQUEST, SCORED, Stage, Worker, group, make_books

from async_grpo.batching.leased_work import LeasedWork, LeasedWorkers, check_completions
from async_grpo.batching.losses import Members
from async_grpo.config.roles import role_of
from async_grpo.controller.leases import Lease
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.types import (
    Cut,
    EvaluationTerms,
    Hold,
    Pulse,
    RequestPulse,
    Rewards,
    Turn,
    VersionSpan,
    WeightsAck,
    WeightsSnapshot,
    WorkerInfo,
)
from async_grpo.types.samples import joined
from async_grpo.util.errors import LeaseLost, LossCause, ProcessLostError, WorkerError

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

        with contextlib.closing(
            Members(request, QUESTION, account, grade, lambda: True)
        ) as members:
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
    told = []

    async def scenario():
        info = WorkerInfo("w", "generation", "node", 1, "m", 64, 8.0, 0.0, 64)
        lease = Lease(0, info, None, 4.0, None)
        lease.told = lambda cuts: told.append([cut.number for cut in cuts])
        for number, num_tokens in ((0, 7), (0, 8), (2, 9)):  # an answer that is told twice, too
            lease.heard(RequestPulse(num_tokens, False, Cut(number, (turn(0, 5),))))
        left = [lease.num_tokens]
        lease.heard(RequestPulse(3, False))  # outputs have ended since
        left.append(lease.num_tokens)
        lease.heard(RequestPulse(4, False, Cut(1, (turn(0, 5),))))
        lease.heard(RequestPulse(5, False))
        return lease, [*left, lease.num_tokens]

    lease, left = run(scenario())
    assert [cut.number for cut in lease.cuts] == [0, 1]
    assert told == [[0], [0, 1]]
    assert left == [2, 0, 1]  # of 9, of which 7 are in the cut; of 5, of which 4 are


def part(*ids, ended="", version=OLDEST):
    """Tokens of one output that a cut tells."""
    return Turn(
        np.array(ids, np.int32),
        np.array(ids, np.float32) / -8,
        (VersionSpan(version, 0, len(ids)),) if ids else (),
        ended or "unfinished",
        f"up to {ids[-1]}" if ids else "",
    )


def ids_of(turns):
    return [turn.token_ids.tolist() for turn in turns]


class Graded:
    """Members whose grades are their first tokens, and what graders were asked."""

    def __init__(self, *, num_samples=3, sampling=CONTRACT):
        self.asked, self.waits = [], asyncio.Event()
        self.waits.set()
        request = replace(REQUEST, num_samples=num_samples, sampling=sampling)
        self.account = make_books(request)
        self.members = Members(request, QUESTION, self.account, self.grade, lambda: True)

    async def grade(self, requests):
        self.asked += requests
        await self.waits.wait()
        return tuple(make_verdict(float(asked.completion.token_ids[-1])) for asked in requests)

    async def told(self, *cuts):
        for number in range(1, len(cuts) + 1):
            self.members.told(cuts[:number])
            await asyncio.sleep(0)

    @property
    def graded(self):
        return [(asked.index, asked.completion.token_ids.tolist()) for asked in self.asked]


def test_what_several_engines_had_is_kept_until_the_last_one_ends():
    first = [
        Cut(0, (part(1, 2), part(11), part(21))),
        Cut(1, (part(3), part(12, ended="stop"), part(22))),
        Cut(2, (part(), part(ended="stop"), part(23, version=NEWER))),
    ]
    third = [Cut(0, (part(4, ended="length"), part(ended="stop"), part(24)))]

    async def scenario():
        group = Graded()
        await group.told(*first)
        assert group.graded == [(1, [11, 12])]
        requests = [group.members.again("lease revoked", first)]
        requests.append(group.members.again("stalled", []))  # it was lost before its first cut
        await group.told(*third)
        assert group.graded == [(1, [11, 12]), (0, [1, 2, 3, 4])]
        requests.append(group.members.again("worker died", third))
        turns = (*requests[-1][0].begun[:2], part(21, 22, 23, 24, 25, ended="stop"))
        verdicts = await group.members.verdicts(turns)
        assert group.graded[2:] == [(2, [21, 22, 23, 24, 25])]
        assert [verdict.reward for verdict in verdicts] == [4, 12, 25]
        assert all(asked.question is QUESTION for asked in group.asked)
        return group.account, requests

    account, ((one, cost), (two, as_before), (three, less)) = run(scenario())
    assert (cost, as_before, less) == (2, 2, 1)
    assert ids_of(one.begun) == ids_of(two.begun) == [[1, 2, 3], [11, 12], [21, 22, 23]]
    assert ids_of(three.begun) == [[1, 2, 3, 4], [11, 12], [21, 22, 23, 24]]
    for turn in (*one.begun, *three.begun):
        assert (turn.logprobs * -8).tolist() == turn.token_ids.tolist()
    assert [turn.finish_reason for turn in three.begun] == ["length", "stop", "unfinished"]
    assert [span for span in three.begun[2].weights_versions] == [
        (OLDEST, 0, 1), (OLDEST, 1, 2), (NEWER, 2, 3), (OLDEST, 3, 4),
    ]  # fmt: skip
    assert account.continued == {"lease revoked": 1, "stalled": 1, "worker died": 1}
    assert not account.resampled


@pytest.mark.parametrize("reason", ["stale answer", "worker error"])
def test_after_a_bad_answer_all_is_sampled_again_and_what_is_new_is_graded_again(reason):
    cuts = [Cut(0, (part(1, ended="stop"), part(11, ended="stop"), part(21)))]

    async def scenario():
        group = Graded()
        await group.told(*cuts)
        kept = group.members.again("worker died", cuts)
        dropped = group.members.again(reason, cuts)
        nothing = group.members.again("worker died", [])
        turns = (part(2, ended="stop"), part(11, ended="stop"), part(21, 22, ended="stop"))
        verdicts = await group.members.verdicts(turns)
        assert group.graded == [(0, [1]), (1, [11]), (0, [2]), (2, [21, 22])]
        assert [verdict.reward for verdict in verdicts] == [2, 11, 22]
        return group.account, kept, dropped, nothing

    account, (request, cost), *without = run(scenario())
    assert cost == 1 and ids_of(request.begun) == [[1], [11], [21]]
    assert [(again.begun, cost) for again, cost in without] == [((), 3)] * 2
    assert account.continued == {"worker died": 1}
    assert account.resampled == {reason: 1, "worker died": 1}


def test_an_output_under_a_grammar_has_no_cuts():
    assert Graded().members.request.with_cuts
    under = replace(CONTRACT, grammar='{"regex": "a"}')
    assert not Graded(sampling=under).members.request.with_cuts


def test_a_group_that_is_given_up_is_graded_no_more_and_its_errors_are_nobodys():
    unheard = []

    async def scenario():
        asyncio.get_running_loop().set_exception_handler(lambda loop, told: unheard.append(told))
        group, failing = Graded(), Graded()
        group.waits.clear()

        async def fail(requests):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                raise WorkerError("the verifier has died as well") from None

        failing.members._grade = fail
        for each in (group, failing):
            await each.told(Cut(0, (part(1, ended="stop"), part(11), part(21))))
            each.members.close()
        await asyncio.sleep(1)
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "grade-early"]
        del failing, each
        gc.collect()

    run(scenario())
    assert not unheard


class Grader:
    """A verifier pool, and how many outputs each of its requests had."""

    def __init__(self, *rewards, groupwise=()):
        self.info = WorkerInfo("pool", "verifier", "node", 1)
        self.info = replace(self.info, rewards=Rewards(rewards, "", {}, 1, 1, groupwise))
        self.sizes = []

    async def verify(self, request):
        self.sizes.append(len(request.outputs))
        return SCORED[:1] * len(request.outputs)


class Verifiers(Registry):
    """Of one pool, which has registered or will do so when it is asked."""

    def __init__(self, pool, *, has_joined):
        super().__init__(pool, role="verifier")
        self.has_joined = has_joined

    @property
    def members(self):
        return self.workers if self.has_joined else ()


@pytest.mark.parametrize(("groupwise", "has_joined"), [((), True), ((), False), (("a",), True)])
def test_a_reward_that_may_compare_the_outputs_of_a_group_gets_them_all_at_once(
    groupwise, has_joined
):
    fleet, pool = Fleet(tells=True), Grader("a", groupwise=groupwise)
    pipeline, verifiers = fleet.stage.pipeline, Verifiers(pool, has_joined=has_joined)
    pipeline._registry_of = {"verifier": verifiers}.__getitem__
    of_role = {"generation": fleet.registry, "verifier": verifiers}
    pipeline.workers._registry_of = of_role.__getitem__

    async def scenario():
        await fleet._join("first")
        await fleet.registry.publish(WeightsSnapshot(OLDEST, ()), timeout_s=60.0)

        async def play(number):
            request = replace(REQUEST, ordinal=number, num_samples=GROUP, sampling=CONTRACT)
            account = make_books(request)
            return await pipeline.play(QUESTION, request, oldest=OLDEST, account=account)

        return await asyncio.gather(*(play(number) for number in range(10)))

    played = run(scenario())
    assert [len(verdicts) for _, verdicts in played] == [GROUP] * 10
    assert sum(pool.sizes) == 10 * GROUP
    assert (min(pool.sizes) == GROUP) == (not has_joined or bool(groupwise))


class Telling:
    """An engine that answers nothing; a test says what its next pulses tell."""

    def __init__(self):
        self.requests = {}

    async def ping(self, after_s=0.0):
        await asyncio.sleep(after_s)
        return Pulse("served", int(now_s() * 1000), dict(self.requests))

    async def load_weights(self, snapshot):
        return WeightsAck("telling", snapshot.version, 0.0, 0.0)


def test_places_of_ended_outputs_are_given_up_once_and_to_whoever_waits():
    async def scenario():
        registry = WorkerRegistry(
            role_of("generation"), kill=lambda handle: None, ping_interval_s=PING_S
        )
        engine = Telling()
        info = WorkerInfo("telling", "generation", "node", 1, "m", 64, NUM_SEATS, 0.0, 10**6)
        await registry.register(info, Handle(engine))
        await registry.publish(WeightsSnapshot(OLDEST, ()), timeout_s=60.0)

        async def asked(opened, cost=1.0, **terms):
            """A lease, or who waits for one."""
            lease = registry.lease(cost, version=OLDEST, timeout_s=600.0, **terms)
            asking = asyncio.create_task(opened.enter_async_context(lease))
            await asyncio.sleep(0.01)
            return asking

        async def singles(opened):
            """As many leases of one place as there are free ones."""
            num = 0
            while (asking := await asked(opened)).done():
                num += 1
            asking.cancel()
            return num

        def told(lease, number, *ended):
            parts = tuple(part(1, ended="stop" if is_ended else "") for is_ended in ended)
            return {lease.lease_id: RequestPulse(9, False, Cut(number, parts))}

        hold = EvaluationTerms(hold=Hold(OLDEST))  # of no worker: it is not counted
        async with contextlib.AsyncExitStack() as opened, contextlib.AsyncExitStack() as others:
            lease = await (await asked(opened, 4.0))
            beside = await (await asked(opened, 4.0, terms=hold))
            assert beside.cost == 0 and await singles(others) == 4
            waiting = await asked(others)
            await asyncio.sleep(3 * PING_S)
            assert not waiting.done()
            engine.requests = told(lease, 0, True, False, False, False)
            engine.requests |= told(beside, 0, True, False, False, False)
            await asyncio.sleep(3 * PING_S)
            assert waiting.done() and (lease.cost, beside.cost) == (3, 0)
            assert await singles(others) == 0
            engine.requests = told(lease, 1, True, True, False, True)
            await asyncio.sleep(2 * PING_S)
            assert lease.cost == 1 and await singles(others) == 2
            await opened.aclose()
            assert await singles(others) == 1
        async with contextlib.AsyncExitStack() as opened:
            assert await singles(opened) == NUM_SEATS

    run(scenario())


def test_an_engine_that_is_lost_before_its_first_cut_costs_none_of_the_earlier_ones():
    fleet = Fleet(tells=True)

    async def flight_on(engine):
        while not engine.flights:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        (flight,) = engine.flights.values()
        return flight

    async def scenario():
        engines = [await fleet._join("first")]
        await fleet.registry.publish(WeightsSnapshot(OLDEST, ()), timeout_s=60.0)
        request = replace(REQUEST, num_samples=GROUP, sampling=CONTRACT)
        account = make_books(request)
        asking = asyncio.create_task(fleet.generate(request, account))
        flights = [await flight_on(engines[0])]
        flights[0].kinds, flights[0].lengths = [0, 1, 0, 1], [15, 900, 5, 800]
        await asyncio.sleep(3.5 * PING_S)
        for name in ("second", "third"):
            engines.append(await fleet._join(name))
            engines[-2].dead.set()
            flights.append(await flight_on(engines[-1]))
            (member,) = fleet.registry.members
            (lease,) = member.leases.values()
            assert lease.cost == 2  # of four
        return flights, await asking, account

    (_, second, third), turns, account = run(scenario())
    assert [len_of(turn) for turn in second.request.begun] == [15, 30, 5, 30]
    assert ids_of(third.request.begun) == ids_of(second.request.begun)
    assert ids_of(turns)[0] == [0] * 15 and ids_of(turns)[2] == [0] * 5
    assert [len_of(turn) - 30 for turn in turns[1::2]] == third.lengths[1::2]
    assert account.continued == {"worker died": 2} and not account.resampled


class Refusing(Registry):
    """Its first lease is lost after a cut, its second before it is granted."""

    @contextlib.asynccontextmanager
    async def lease(self, cost, **options):
        number = len(self.asked)
        if number == 1:
            self.asked.append((cost, None))
            raise LeaseLost(LossCause.LEFT, "the line was ended")
        async with super().lease(cost, **options) as lease:
            if number == 0:
                lease.heard(RequestPulse(5, False, Cut(0, (turn(0, 5),))))
                self.revoke(0)
            yield lease


def test_a_cut_is_gone_on_from_once_though_no_other_worker_is_found():
    registry, told = Refusing(Worker(group())), []

    def again(reason, cuts):
        told.append([cut.number for cut in cuts])
        return REQUEST, 1

    work = LeasedWork(role="generation", method="generate", request=REQUEST, cost=2, again=again)
    run(LeasedWorkers(lambda role: registry, timeout_s=60.0).answer(work))
    assert told == [[0], []]
    assert [cost for cost, _ in registry.asked] == [2, 1, 1]


def test_parts_of_an_output_are_joined_to_the_whole_wherever_it_was_cut():
    ids = np.arange(12, dtype=np.int32)
    spans = (VersionSpan(OLDEST, 0, 5), VersionSpan(NEWER, 5, 12))
    whole = Turn(ids, ids / np.float32(-8), spans, "length", "text", "worker")
    for first, second in itertools.combinations_with_replacement(range(13), 2):
        parts = [
            replace(
                whole,
                token_ids=ids[start:stop],
                logprobs=whole.logprobs[start:stop],
                weights_versions=tuple(
                    VersionSpan(v, max(begin, start) - start, min(end, stop) - start)
                    for v, begin, end in spans
                    if max(begin, start) < min(end, stop)
                ),
                finish_reason="length" if stop == 12 else "unfinished",
                text="text" if stop == 12 else "",
            )
            for start, stop in ((0, first), (first, second), (second, 12))
        ]
        turn = joined(parts)
        assert turn.token_ids.tolist() == ids.tolist()
        assert turn.logprobs.tolist() == whole.logprobs.tolist()
        of_each = [v for v, start, stop in turn.weights_versions for _ in range(start, stop)]
        assert of_each == [OLDEST] * 5 + [NEWER] * 7
        check_completions(replace(REQUEST, num_samples=1), (turn,), OLDEST)
        assert (turn.finish_reason, turn.text, turn.worker_id) == ("length", "text", "worker")
