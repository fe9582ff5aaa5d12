"""Simulates one run on a virtual clock: questions go round from admission to new weights.

    admission ─▶ lease ─▶ engine ─▶ verifiers ─▶ rounds ─▶ trainers ─▶ weights ─▶ admission

Registries, leases, pipeline and batcher are those of real runs. Workers and trainer ranks are
scripted: each takes the time that its rates say. So does the control process, which serves one call
after the other.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from async_grpo import types
from async_grpo.algorithms.base import ScoreNeed
from async_grpo.batching.leased_work import Scores
from async_grpo.batching.packing import estimate_cost
from async_grpo.batching.records import BatcherPlan
from async_grpo.config.roles import GENERATION, REFERENCE, TEACHER, VERIFIER, role_of
from async_grpo.config.train_config import TrainConfig
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.controller.served_run import ServedRun
from async_grpo.planning import clock
from async_grpo.planning.rates import (
    ControlCosts,
    EngineRates,
    OutputLengths,
    ScorerRates,
    SyncRates,
    TrainerRates,
)

FIRST = types.WeightsVersion(0, 0)
FOREVER_S = 1e9  # no simulated process times out, however slow
LONG_S = 2_000.0  # of the run, after which pings become fewer
SCORED = types.Verdict.scored(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorers:
    """The workers of the reference model or of one teacher."""

    rates: ScorerRates
    num_workers: int = 1
    role: str = REFERENCE
    max_tokens: int = 32_768  # of a worker's forward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The processes of a simulated run, their rates, and the run's options."""

    engine: EngineRates
    trainer: TrainerRates
    lengths: OutputLengths
    num_engines: int = 1
    overhead_seqs: int = 8  # leased to an engine beyond its capacity: --overhead-seqs
    num_ranks: int = 8
    scorers: tuple[Scorers, ...] = ()
    sync: SyncRates = field(default_factory=SyncRates)
    control: ControlCosts = field(default_factory=ControlCosts)
    num_batches: int = 8
    batch_size: int = 128
    steps_per_batch: int = 1  # of one pass
    num_passes: int = 1  # later ones count as time of their batch's last step
    samples_per_question: int = 8
    prompt_tokens: int = 200
    max_staleness: int = 0
    contributing: float = 1.0  # share of the questions whose samples are trained
    waits_for_step: bool = False  # training of a step starts when all its groups are finished
    colocated: bool = False
    turn_s: float = 0.0  # in which a device changes hands
    seed: int = 0

    @property
    def questions_per_step(self) -> int:
        return self.batch_size // self.steps_per_batch

    @property
    def teachers(self) -> tuple[str, ...]:
        """The teachers' names; each teaches one type, and all types have as many questions."""
        names = (each.role.partition(":")[2] for each in self.scorers if each.role != REFERENCE)
        return tuple(dict.fromkeys(names))

    def drawn(self, ordinal: int) -> list[int]:
        """Output tokens of a question's samples, which depend on the seed and ordinal alone."""
        rng = np.random.default_rng([self.seed, ordinal])
        return [int(length) for length in self.lengths(rng, self.samples_per_question)]

    def contributes(self, ordinal: int) -> bool:
        """Whether the samples of a question are trained."""
        return bool(np.random.default_rng([self.seed, ordinal, 1]).random() < self.contributing)

    def cost(self, num_tokens: int) -> float:
        """The cost of a sample, in units of one token's matrix products."""
        return estimate_cost(num_tokens, attention_ratio=self.trainer.attention_ratio)


@dataclass(slots=True)
class Step:
    """Measures of one gradient step; seconds of engines and scorers are sums over all of them."""

    start_s: float  # the end of the step before
    end_s: float = 0.0
    first_ready_s: float = 0.0  # its first group was graded
    first_backward_s: float = 0.0
    busy_s: float = 0.0  # in rounds, each as long as its slowest rank
    gathering_s: float = 0.0
    blocked_s: float = 0.0  # ranks wait for the end of the publication before
    num_rounds: int = 0
    num_samples: int = 0
    num_tokens: int = 0  # prompts and outputs, as trained
    engines_busy_s: float = 0.0  # with at least one sequence
    engines_stalled_s: float = 0.0  # loading weights, reading prompts, rebuilding caches
    sequence_s: float = 0.0  # of every running sequence
    scoring_s: float = 0.0  # of all reference and teacher workers
    control_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def simulate(
    scenario: Scenario,
    *,
    num_steps: int = 0,
    make: Callable[..., ServedRun] = ServedRun,
) -> list[Step]:
    """The first `num_steps` gradient steps of the run; 0: all. `make` builds the served run."""

    async def run() -> list[Step]:
        whole = scenario.num_batches * scenario.steps_per_batch
        async with asyncio.TaskGroup() as publications:
            return await _Run(scenario, make, publications).train(num_steps or whole)

    return clock.run(run())


def mean(steps: Sequence[Step], of: Callable[[Step], float]) -> float:
    """The mean of `of` over the steps.

    >>> mean([Step(0.0, 1.0), Step(1.0, 4.0)], lambda step: step.seconds)
    2.0
    """
    return sum(map(of, steps)) / len(steps)


class _Worker:
    """A worker of any role, whose methods registries and leases call."""

    def __init__(self, run: _Run, role: str, *, capacity: float, overhead: float = 0.0) -> None:
        """`capacity` and `overhead` are in the unit of the role."""
        self.run = run
        self.role, self.capacity, self.overhead = role, capacity, overhead
        self.process = clock.Process()
        self.version = FIRST

    async def sleep(self) -> None:
        await asyncio.sleep(self.run.scenario.turn_s)

    async def ping(self, after_s: float) -> types.Pulse:
        # In a long run pings are fewer, and each costs as much as those that it replaces.
        times = max(1.0, _now() / LONG_S)
        await asyncio.sleep(times * after_s)
        await self.run.control.work(times * self.run.scenario.control.ping_s)
        return types.Pulse("")

    async def load_weights(self, snapshot: types.WeightsSnapshot) -> types.WeightsAck:
        self.version = snapshot.version
        return types.WeightsAck("", snapshot.version, 0.0, 0.0)

    async def verify(self, request: types.GradingRequest) -> tuple[types.Verdict, ...]:
        await asyncio.sleep(self.run.scenario.control.verification_s)
        return (SCORED,) * len(request.outputs)


class _Generator(_Worker):
    def __init__(self, run: _Run) -> None:
        rates, overhead = run.scenario.engine, run.scenario.overhead_seqs
        super().__init__(run, GENERATION, capacity=rates.capacity, overhead=overhead)
        self.engine = clock.Engine(rates)

    async def load_weights(self, snapshot: types.WeightsSnapshot) -> types.WeightsAck:
        if snapshot.version != self.version:
            load_s = self.run.scenario.sync.load_s + self.run.scenario.turn_s
            self.engine.update(load_s)
            await asyncio.sleep(load_s)
        return await super().load_weights(snapshot)

    async def generate(self, request: types.GenerationRequest) -> tuple[types.Turn, ...]:
        scenario = self.run.scenario
        lengths = scenario.drawn(request.ordinal)
        await self.run.control.work(scenario.control.group_s)
        version = self.version
        await self.engine.generate(scenario.prompt_tokens, lengths)
        return tuple(self._turn(version, length) for length in lengths)

    def _turn(self, version: types.WeightsVersion, length: int) -> types.Turn:
        tokens, logprobs = self.run.tokens[:length], self.run.logprobs[:length]
        return types.Turn(tokens, logprobs, (types.VersionSpan(version, 0, length),), "stop", "")


class _Scorer(_Worker):
    def __init__(self, run: _Run, scorers: Scorers) -> None:
        super().__init__(run, scorers.role, capacity=scorers.max_tokens)
        self._rates = scorers.rates

    async def logprobs(self, request: types.LogprobRequest) -> tuple[Scores, ...]:
        rows = zip(request.prompt_token_ids, request.output_token_ids, strict=True)
        cost = sum(self.run.scenario.cost(len(prompt) + len(output)) for prompt, output in rows)
        await self.process.work(self._rates.group_s + cost / self._rates.cost_per_second)
        return tuple(self.run.logprobs[: len(ids)] for ids in request.output_token_ids)


class _Rules:
    """The algorithm's rules that take time: which scores, which waits, which groups train."""

    def __init__(self, run: _Run) -> None:
        roles = (TEACHER if each.role != REFERENCE else REFERENCE for each in run.scenario.scorers)
        self.needs = tuple(map(ScoreNeed, dict.fromkeys(roles)))
        self.waits_for_step = run.scenario.waits_for_step
        self.first_ready_s: dict[int, float] = {}  # {step: when its first group was finished}
        self._run = run

    async def finish_group(self, group: types.Group) -> types.Group:
        scenario = self._run.scenario
        await self._run.control.work(len(group.samples) * scenario.control.sample_s)
        self.first_ready_s.setdefault(group.ordinal // scenario.questions_per_step, _now())
        if scenario.contributes(group.ordinal):
            return group
        samples = tuple(replace(sample, contributes=False) for sample in group.samples)
        return replace(group, samples=samples)

    async def finish_step(self, groups: Sequence[types.Group]) -> tuple[types.Group, ...]:
        return tuple(groups)


class _Run:
    """The whole run. Its ranks go in lock step with the slowest, and ask one item ahead."""

    def __init__(
        self,
        scenario: Scenario,
        make: Callable[..., ServedRun],
        publications: asyncio.TaskGroup,
    ) -> None:
        self.scenario, self._publications = scenario, publications
        self.control = clock.Process()
        longest = scenario.trainer.max_tokens
        self.tokens, self.logprobs = np.zeros(longest, np.int32), np.zeros(longest, np.float32)
        self._generators = [_Generator(self) for _ in range(scenario.num_engines)]
        self._scorers = [
            _Scorer(self, each) for each in scenario.scorers for _ in range(each.num_workers)
        ]
        verifiers = _Worker(self, VERIFIER, capacity=FOREVER_S)
        self._workers: list[_Worker] = [*self._generators, *self._scorers, verifiers]
        self._registries = {
            role: WorkerRegistry(role_of(role)) for role in {each.role for each in self._workers}
        }
        self._rules = _Rules(self)
        self._served = make(_plan_of(scenario, self._rules), self._registries.__getitem__)
        self._seconds = self._seconds_until_now()

    async def train(self, num_steps: int) -> list[Step]:
        """Train `num_steps` gradient steps, and return the measures of each."""
        await self._start()
        steps, step = list[Step](), Step(0.0)
        publication = self._publications.create_task(asyncio.sleep(0), name="nothing yet")
        asked = asyncio.create_task(self._ask(0), name="ask-0")
        for index in itertools.count(1):
            await asyncio.sleep(0)
            if not asked.done():
                await self._served.batcher.hungry(index - 1)
            answers = await asked
            asked = asyncio.create_task(self._ask(index), name=f"ask-{index}")
            for items in zip(*answers, strict=True):
                if not isinstance(end := items[0], types.EndOfStep):
                    await self._compute(items, step)
                    continue
                await asyncio.sleep(self.scenario.trainer.step_s)
                if end.is_last_of_batch:
                    if self.scenario.num_passes > 1:
                        own = steps[len(steps) + 1 - self.scenario.steps_per_batch :]
                        await self._train_again(own, step)
                    began_s, step.gathering_s = _now(), self.scenario.sync.gather_s
                    await publication
                    step.blocked_s = _now() - began_s
                    await asyncio.sleep(step.gathering_s)
                    publication = self._publications.create_task(self._publish(end.batch + 1))
                self._close(step, len(steps))
                steps.append(step)
                if len(steps) == num_steps:
                    return steps
                step = Step(_now())
        raise AssertionError("steps end before numbers do")

    async def _train_again(self, earlier: Sequence[Step], last: Step) -> None:
        """Train the later passes of a batch of these steps: no round waits for samples."""
        scenario = self.scenario
        times, steps = scenario.num_passes - 1, (*earlier, last)
        seconds = times * sum(step.busy_s for step in steps)
        last.busy_s += seconds
        await asyncio.sleep(seconds + times * len(steps) * scenario.trainer.step_s)

    async def _start(self) -> None:
        """Register all workers, and publish the first weights."""
        for number, worker in enumerate(self._workers):
            info = types.WorkerInfo(
                str(number), worker.role, "", 0, "", 0, worker.capacity, worker.overhead, 0,
                lease_s=FOREVER_S,
            )  # fmt: skip
            await self._registries[worker.role].register(info, clock.Local(worker))  # type: ignore[arg-type]
        for registry in self._registries.values():
            await registry.publish(types.WeightsSnapshot(FIRST, ()), timeout_s=FOREVER_S)
        await self._served.published(FIRST)

    async def _ask(self, index: int) -> list[types.StreamItems]:
        """The items number `index` of every rank."""
        ranks, take = range(self.scenario.num_ranks), self._served.batcher.next_items
        answers = await asyncio.gather(*(take(rank, index) for rank in ranks))
        await self.control.work(len(ranks) * self.scenario.control.item_s)
        return answers

    async def _compute(self, items: Sequence[types.StreamItem], step: Step) -> None:
        """Train a round: one minibatch a rank."""
        rates = self.scenario.trainer
        minibatches = [item.samples for item in items if not isinstance(item, types.EndOfStep)]
        tokens = [[sample.num_tokens for sample in samples] for samples in minibatches]
        slowest = max(sum(map(self.scenario.cost, each)) for each in tokens)
        seconds = max(slowest / rates.cost_per_second, rates.round_floor_s) + rates.round_overhead_s
        step.first_backward_s = step.first_backward_s or _now()
        step.busy_s += seconds
        step.num_rounds += 1
        step.num_samples += sum(map(len, tokens))
        step.num_tokens += sum(map(sum, tokens))
        await asyncio.sleep(seconds)

    def _close(self, step: Step, number: int) -> None:
        step.end_s, step.first_ready_s = _now(), self._rules.first_ready_s.pop(number)
        before, self._seconds = self._seconds, self._seconds_until_now()
        for name, seconds in self._seconds.items():
            setattr(step, name, seconds - before[name])

    def _seconds_until_now(self) -> dict[str, float]:
        """{field of `Step`: its seconds since the run began}."""
        engines = [generator.engine for generator in self._generators]
        for engine in engines:
            engine.catch_up()
        return {
            "engines_busy_s": sum(engine.busy_s for engine in engines),
            "engines_stalled_s": sum(engine.stalled_s for engine in engines),
            "sequence_s": sum(engine.sequence_s for engine in engines),
            "scoring_s": sum(scorer.process.worked_s for scorer in self._scorers),
            "control_s": self.control.worked_s,
        }

    async def _publish(self, batches: int) -> None:
        """Send new weights, have engines load them, and admit the questions that they serve."""
        await asyncio.sleep(self.scenario.sync.transfer_s)
        snapshot = types.WeightsSnapshot(FIRST._replace(batches=batches), ())
        await self._registries[GENERATION].publish(snapshot, timeout_s=FOREVER_S)
        await self._served.published(snapshot.version)


def _plan_of(scenario: Scenario, rules: _Rules) -> BatcherPlan:
    """The plan of the scenario's run for its batcher."""
    teachers, prompt = scenario.teachers, np.zeros(scenario.prompt_tokens, np.int32)
    config = TrainConfig(
        model_name_or_path="none",
        data_path="none",
        batch_size=scenario.batch_size,
        train_minibatch_size=scenario.questions_per_step,
        num_training_batches=scenario.num_batches,
        samples_per_question=scenario.samples_per_question,
        max_tokens_per_gpu=scenario.trainer.max_tokens,
        max_staleness=scenario.max_staleness,
        colocated=scenario.colocated,
        stall_timeout_s=FOREVER_S,
        dump_samples_filename="",
        teacher_for=",".join(f"{name}={name}" for name in teachers),
        opd_coefficient=float(bool(teachers)),
    )
    questions = tuple(types.Question(prompt, "", None, {}, kind) for kind in teachers or ("",))
    return BatcherPlan(
        config=config,
        questions=questions,
        held_out=(),
        order=lambda ordinal: ordinal % len(questions),
        replacement=lambda slot, *, attempt: 0,
        seed_of=None,
        sampling=types.SamplingContract(1.0, (), scenario.trainer.max_tokens),
        num_ranks=scenario.num_ranks,
        incarnation=FIRST.incarnation,
        rules=rules,
        attention_ratio=scenario.trainer.attention_ratio,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
