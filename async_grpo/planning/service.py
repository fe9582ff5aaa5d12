"""One run of the service on a virtual clock: questions go round from admission to new weights.

    admission ─▶ lease ─▶ engine ─▶ verifiers ─▶ rounds ─▶ trainers ─▶ weights ─▶ admission

Admission window, balancer, ledger, rounds with their packing, and outbox are the service's own
code. Registry and batcher are one process here, which serves one call at a time.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from async_grpo.batching.admission import AdmissionWindow, StepKey
from async_grpo.batching.ledger import Ledger
from async_grpo.batching.outbox import Outbox
from async_grpo.batching.packing import Item, Key, estimate_cost
from async_grpo.batching.rounds import Round, RoundFormer
from async_grpo.controller.balancer import Balancer
from async_grpo.planning import clock
from async_grpo.planning.rates import (
    ControlCosts,
    EngineRates,
    OutputLengths,
    ScorerRates,
    SyncRates,
    TrainerRates,
)
from async_grpo.types import WeightsVersion

PING_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorers:
    """The workers of one such role."""

    rates: ScorerRates
    num_workers: int = 1
    share: float = 1.0  # of the questions that they score: of several teachers each has its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Who there is, how fast, and what they do."""

    engine: EngineRates
    trainer: TrainerRates
    lengths: OutputLengths
    num_engines: int = 1
    overhead_seqs: int = 8  # leased to an engine beyond its places: --overhead-seqs
    num_ranks: int = 8
    scorers: tuple[Scorers, ...] = ()
    sync: SyncRates = field(default_factory=SyncRates)
    control: ControlCosts = field(default_factory=ControlCosts)
    num_batches: int = 8
    batch_size: int = 128
    steps_per_batch: int = 1
    samples_per_question: int = 8
    prompt_tokens: int = 200
    max_staleness: int = 0
    contributing: float = 1.0  # share of the questions whose samples are trained, not only counted
    seed: int = 0

    def drawn(self, ordinal: int) -> list[int]:
        """Output tokens of a question's samples, whenever they are generated."""
        rng = np.random.default_rng([self.seed, ordinal])
        return [int(length) for length in self.lengths(rng, self.samples_per_question)]

    def chance(self, ordinal: int, number: int = 0) -> float:
        """Of a question, in [0, 1): what shares of the questions are told by."""
        return float(np.random.default_rng([self.seed, ordinal, number + 1]).random())


@dataclass(slots=True)
class Step:
    """What became of one gradient step; seconds within it, over all engines where they are."""

    start_s: float  # the end of the step before
    end_s: float = 0.0
    first_ready_s: float = 0.0  # its first group was graded
    first_backward_s: float = 0.0
    busy_s: float = 0.0  # in rounds: as long as the slowest rank
    gathering_s: float = 0.0
    blocked_s: float = 0.0  # the publication before was not through
    num_rounds: int = 0
    num_samples: int = 0
    num_tokens: int = 0  # prompts and outputs, as trained
    engines_busy_s: float = 0.0  # with any sequence
    engines_stalled_s: float = 0.0  # loading weights, reading prompts and caches
    sequence_s: float = 0.0  # places of engines that hold one
    scoring_s: float = 0.0  # of all reference and teacher workers
    control_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def ours(scenario: Scenario) -> RoundFormer:
    """The batcher's own rule."""
    return _former(scenario)


def whole_batch(scenario: Scenario) -> RoundFormer:
    """A step is trained when it is complete, never before."""
    return _former(scenario, deterministic=True)


def whatever_there_is(scenario: Scenario) -> RoundFormer:
    """A round goes out whenever trainers ask and anything is ready."""
    return _former(scenario, fill_target=1e-12)


def _former(scenario: Scenario, **options: Any) -> RoundFormer:
    max_tokens = scenario.trainer.max_tokens
    steps = scenario.steps_per_batch
    return RoundFormer(scenario.num_ranks, max_tokens=max_tokens, steps_per_batch=steps, **options)


def simulate(scenario: Scenario, policy: Callable[[Scenario], RoundFormer] = ours) -> list[Step]:
    """Every gradient step of the run; `policy` makes what decides when a round goes out."""

    async def run() -> list[Step]:
        return await _Service(scenario, policy(scenario)).train()

    return clock.run(run())


class _Service:
    def __init__(self, scenario: Scenario, rounds: RoundFormer) -> None:
        self._scenario = scenario
        self._rounds = rounds
        self._window = AdmissionWindow(
            scenario.batch_size,
            questions_per_step=scenario.batch_size // scenario.steps_per_batch,
            max_staleness=scenario.max_staleness,
            num_batches=scenario.num_batches,
        )
        self._ledger = Ledger()
        self._balancer = Balancer()
        self._engines = [clock.Engine(scenario.engine) for _ in range(scenario.num_engines)]
        for number in range(scenario.num_engines):
            self._balancer.add_worker(
                str(number),
                capacity=scenario.engine.capacity,
                overhead=scenario.overhead_seqs,
                version=WeightsVersion(0, 0),
            )
        self._line: deque[tuple[WeightsVersion, asyncio.Future[str]]] = deque()
        self._control = clock.Process()
        self._scorers = [
            [clock.Process() for _ in range(scorers.num_workers)] for scorers in scenario.scorers
        ]
        self._outbox = Outbox(1)  # all ranks ask at once, and wait for the slowest
        self._formed: dict[int, list[Round | StepKey]] = {}  # by index of the answer
        self._items: dict[Key, Item] = {}
        self._unsettled: dict[StepKey, int] = {}  # questions
        self._first_ready: dict[StepKey, float] = {}
        self._totals = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._tasks: set[asyncio.Task[None]] = set()

    async def train(self) -> list[Step]:
        """The trainer: every round in turn, one item ahead of what it computes."""
        self._spawn(self._send_rounds())
        self._spawn(self._ping())
        self._admit()
        steps: list[Step] = []
        step, index = Step(0.0), 0
        publication = self._spawn(asyncio.sleep(0))
        asked = asyncio.ensure_future(self._outbox.take(0, index))
        while True:
            await asyncio.sleep(0)
            if not asked.done():
                self._outbox.mark_hungry(index)
            await asked
            answer, index = self._formed.pop(index), index + 1
            asked = asyncio.ensure_future(self._outbox.take(0, index))
            for formed in answer:
                if isinstance(formed, Round):
                    await self._compute(formed, step)
            if isinstance(answer[-1], Round):
                continue
            await asyncio.sleep(self._scenario.trainer.step_s)
            key = answer[-1]
            is_last = key.step_in_batch == self._scenario.steps_per_batch - 1
            if is_last:
                began_s = _now()
                await publication
                step.blocked_s = _now() - began_s
                step.gathering_s = self._scenario.sync.gather_s
                await asyncio.sleep(step.gathering_s)
            self._close(step, key)
            steps.append(step)
            if is_last and key.batch == self._scenario.num_batches - 1:
                self._ledger.check()
                return steps
            if is_last:
                publication = self._spawn(self._publish(key.batch + 1))
            step = Step(_now())

    async def _compute(self, formed: Round, step: Step) -> None:
        bins = [[self._items.pop(key) for key in keys] for keys in formed.bins]
        rates = self._scenario.trainer
        slowest = max(sum(item.cost for item in items) for items in bins)
        if not step.num_rounds:
            step.first_backward_s = _now()
        seconds = max(slowest / rates.cost_per_second, rates.round_floor_s) + rates.round_overhead_s
        await asyncio.sleep(seconds)
        samples = [item for items in bins for item in items]
        for ordinal, num in Counter(item.key[0] for item in samples).items():
            self._ledger.settle(ordinal, fate="trained", num_samples=num)
        step.busy_s += seconds
        step.num_rounds += 1
        step.num_samples += len(samples)
        step.num_tokens += sum(item.num_tokens for item in samples)

    def _close(self, step: Step, key: StepKey) -> None:
        self._ledger.close_step(key)
        step.end_s = _now()
        step.first_ready_s = self._first_ready.pop(key)
        for engine in self._engines:
            engine.catch_up()
        totals = (
            sum(engine.busy_s for engine in self._engines),
            sum(engine.stalled_s for engine in self._engines),
            sum(engine.sequence_s for engine in self._engines),
            sum(worker.worked_s for workers in self._scorers for worker in workers),
            self._control.worked_s,
        )
        spent = [now - before for now, before in zip(totals, self._totals, strict=True)]
        step.engines_busy_s, step.engines_stalled_s, step.sequence_s = spent[:3]
        step.scoring_s, step.control_s = spent[3:]
        self._totals = totals

    async def _publish(self, batches: int) -> None:
        """New weights are on their way, loaded, and served."""
        sync = self._scenario.sync
        await asyncio.sleep(sync.transfer_s)
        for engine in self._engines:
            engine.update(sync.load_s)
        await asyncio.sleep(sync.load_s)
        for number in range(self._scenario.num_engines):
            self._balancer.set_version(str(number), WeightsVersion(0, batches))
        self._serve()
        self._window.batch_published(batches)
        self._admit()

    def _admit(self) -> None:
        for ordinal in self._window.start():
            step = self._window.step_of(ordinal)
            num_samples = self._scenario.samples_per_question
            self._ledger.admit(ordinal, num_samples=num_samples, step=step)
            questions = self._scenario.batch_size // self._scenario.steps_per_batch
            self._unsettled.setdefault(step, questions)
            self._spawn(self._run_slot(ordinal, step))

    async def _run_slot(self, ordinal: int, step: StepKey) -> None:
        """A question: leased, generated, graded, ready."""
        scenario, control = self._scenario, self._scenario.control
        lengths = scenario.drawn(ordinal)
        oldest = self._window.oldest_weights(ordinal)
        await self._control.work(control.group_s)
        engine = await self._leased_engine(oldest)
        await self._engines[int(engine)].generate(scenario.prompt_tokens, lengths)
        self._balancer.release(engine, scenario.samples_per_question)
        self._serve()
        await asyncio.sleep(control.verification_s)
        items = [self._item((ordinal, index), length) for index, length in enumerate(lengths)]
        await self._score(ordinal, sum(item.cost for item in items))
        await self._control.work(len(lengths) * control.sample_s)
        self._first_ready.setdefault(step, _now())
        if scenario.contributing < 1 and scenario.chance(ordinal) >= scenario.contributing:
            self._ledger.settle(ordinal, fate="zero_contribution", num_samples=len(lengths))
            items = []
        for item in items:
            self._items[item.key] = item
            self._rounds.offer(step, item=item)
        self._unsettled[step] -= 1
        if not self._unsettled[step]:
            self._rounds.step_complete(step)

    def _item(self, key: Key, length: int) -> Item:
        num_tokens = self._scenario.prompt_tokens + length
        ratio = self._scenario.trainer.attention_ratio
        return Item(key, num_tokens, estimate_cost(num_tokens, attention_ratio=ratio))

    async def _score(self, ordinal: int, cost: float) -> None:
        """By one worker of each role that scores the question, one question after the other."""
        for number, (role, workers) in enumerate(
            zip(self._scenario.scorers, self._scorers, strict=True)
        ):
            if role.share < 1 and self._scenario.chance(ordinal, number + 1) >= role.share:
                continue
            free = min(workers, key=lambda worker: worker.free_at_s)
            await free.work(role.rates.group_s + cost / role.rates.cost_per_second)

    async def _leased_engine(self, version: WeightsVersion) -> str:
        granted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._line.append((version, granted))
        self._serve()
        return await granted

    def _serve(self) -> None:
        # Slots are admitted when their weights are served, so the first in line speaks for all.
        while self._line:
            version, granted = self._line[0]
            engine = self._balancer.try_acquire(self._scenario.samples_per_question, version)
            if engine is None:
                return
            self._line.popleft()
            granted.set_result(engine)

    async def _send_rounds(self) -> None:
        """As the batcher's."""
        index, control = 0, self._scenario.control
        while True:
            await self._outbox.wait_for_demand()
            formed = self._rounds.next_round(_now(), hungry=self._outbox.is_hungry)
            if formed is None:
                await asyncio.sleep(control.poll_s)
                continue
            await self._control.work(self._scenario.num_ranks * control.item_s)
            ended = self._rounds.end_step() if isinstance(formed, Round) else None
            self._formed[index] = [formed] if ended is None else [formed, ended]
            index += 1
            self._outbox.put(((),))

    async def _ping(self) -> None:
        """Heartbeats of the workers, together."""
        while self._scenario.control.ping_s:
            await asyncio.sleep(PING_INTERVAL_S)
            await self._control.work(self._scenario.num_engines * self._scenario.control.ping_s)

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def mean(steps: Sequence[Step], of: Callable[[Step], float]) -> float:
    """Of some steps' quantity.

    >>> mean([Step(0.0, 1.0), Step(1.0, 4.0)], lambda step: step.seconds)
    2.0
    """
    return sum(map(of, steps)) / len(steps)


def _now() -> float:
    return asyncio.get_running_loop().time()
