"""Places of engines under groups with a heavy tail: which are idle, by what a lease is of.

    python -m benchmarks.leased_places --json

One output in ten is 30 times as long as the others. Registries, leases and the pipeline are the
service's own, on a clock that jumps; engines are scripted: a sequence holds a place, has a token
each tenth of a second, and waits for a place where none is free. A lease is of

- whole groups: its places are free when its last output has ended;
- groups with cuts, as in runs: pings tell what has ended, and others get those places;
- the same where few sequences may wait in an engine for such places;
- single outputs, a bound: no prompt is computed again, whatever engine an output goes to.

Lengths are the same in all of them, and some groups always wait for a lease. Seconds of pings and
outputs scale together: a ping a second and outputs of 1 and 30 s stand for the shipped five seconds
and outputs of 5 and 150 s. Of longer ones less is told late.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import click
import numpy as np

from async_grpo.batching.admission import StepKey
from async_grpo.batching.ledger import Ledger, SlotAccount
from async_grpo.batching.pipeline import SlotPipeline
from async_grpo.config.roles import GENERATION, VERIFIER, role_of
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.planning import clock
from async_grpo.types import (
    Cut,
    GenerationRequest,
    GradingRequest,
    Pulse,
    Question,
    RequestPulse,
    Rewards,
    SamplingContract,
    Turn,
    Verdict,
    VersionSpan,
    WeightsAck,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)
from benchmarks import episodes, results
from benchmarks.results import Figure, median

NAME = "leased_places"
NUM_ENGINES = 4
TOKENS_A_SECOND = 10.0
MEANS = (10.0, 300.0)  # tokens of short and of long outputs, geometric
SHARE_OF_LONG = 0.1
PING_S = 1.0
WARM_UP_S = 60.0  # until places are held by as many long outputs as later
WAITING = 16  # times the places: outputs of groups that have begun or wait for a lease
CONFIG = WorkerConfig(model_path="none")
QUESTION = Question(np.array([2], np.int32), "", None, {})
FIRST = WeightsVersion(0, 0)
Places = list[tuple[float, float]]  # held from, and to, seconds
WHOLE, CUTS, FEW, SINGLE = (
    "whole groups", "groups with cuts", "cuts, --overhead-seqs 8", "single outputs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """Engines and groups."""

    num_places: int  # of each engine
    group_size: int
    outputs_a_place: int
    num_seeds: int = 1

    def __str__(self) -> str:
        return f"{self.num_places} places, {self.group_size} samples"


SHAPES = (
    Shape(8, 4, 50, num_seeds=3),
    Shape(8, 8, 50, num_seeds=3),
    Shape(64, 8, 25),
    Shape(64, 16, 25),
    Shape(256, 8, 25),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one kind of leases."""

    num_places: int  # of each engine
    seconds: float  # until the last group has ended
    until_s: float  # until when groups wait for a lease
    held: tuple[Places, ...]  # by engine

    @property
    def idle(self) -> float:
        """Share of the places, from `WARM_UP_S` on while groups wait for a lease."""
        held_s = sum(
            max(0.0, min(end_s, self.until_s) - max(start_s, WARM_UP_S))
            for of_engine in self.held
            for start_s, end_s in of_engine
        )
        idle = 1 - held_s / (NUM_ENGINES * self.num_places * (self.until_s - WARM_UP_S))
        return max(0.0, round(idle, 6))


def num_tokens(seed: int, ordinal: int, index: int) -> int:
    """Of one output, whoever samples it."""
    random = np.random.default_rng([seed, ordinal, index])
    is_long = random.random() < SHARE_OF_LONG
    return int(random.geometric(1 / MEANS[is_long]))


@dataclass(slots=True, eq=False)
class Output:
    """One output of a request under way."""

    length: int
    began_s: float | None = None  # None: it waits for a place
    num_told: int = 0

    def num_sampled(self) -> int:
        if self.began_s is None:
            return 0
        return min(self.length, int(TOKENS_A_SECOND * (now_s() - self.began_s) + clock.EPSILON))

    def part(self) -> Turn:
        """What has come since the last one."""
        stop = self.num_sampled()
        start, self.num_told = self.num_told, stop
        return turn(stop - start, "stop" if stop == self.length else "unfinished")


def turn(length: int, finish_reason: str) -> Turn:
    """So many tokens."""
    spans = (VersionSpan(FIRST, 0, length),) if length else ()
    zeros = np.zeros(length, np.float32)
    return Turn(zeros.astype(np.int32), zeros, spans, finish_reason, "")  # type: ignore[arg-type]


def now_s() -> float:
    """On the clock that jumps."""
    return asyncio.get_running_loop().time()


@dataclass(slots=True, eq=False)
class Engine:
    """Scripted; see the file."""

    num_places: int
    seed: int
    tells: bool  # cuts
    asked_s: float = 0.0  # when the latest request came
    held: Places = field(default_factory=list)
    _running: dict[int, tuple[Output, ...]] = field(default_factory=dict)
    _num_cuts: dict[int, int] = field(default_factory=dict)
    _places: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.num_places)

    async def generate(self, request: GenerationRequest) -> tuple[Turn, ...]:
        """All outputs, when the last has ended."""
        self.asked_s = now_s()
        numbers = range(request.attempt, request.attempt + request.num_samples)
        outputs = tuple(Output(num_tokens(self.seed, request.ordinal, n)) for n in numbers)
        self._running[request.lease_id], self._num_cuts[request.lease_id] = outputs, 0
        await asyncio.gather(*map(self._sample, outputs))
        del self._running[request.lease_id], self._num_cuts[request.lease_id]
        return tuple(turn(output.length, "stop") for output in outputs)

    async def _sample(self, output: Output) -> None:
        async with self._places:
            output.began_s = now_s()
            await asyncio.sleep(output.length / TOKENS_A_SECOND)
            self.held.append((output.began_s, now_s()))

    async def ping(self, after_s: float = 0.0) -> Pulse:
        """What all requests have."""
        await asyncio.sleep(after_s)
        return Pulse("none", int(now_s() * 1e6), {n: self._pulse(n) for n in self._running})

    def _pulse(self, lease_id: int) -> RequestPulse:
        outputs = self._running[lease_id]
        left = sum(each.num_sampled() for each in outputs if each.num_sampled() < each.length)
        if not self.tells:
            return RequestPulse(left, is_waiting=False)
        cut = Cut(self._num_cuts[lease_id], tuple(output.part() for output in outputs))
        self._num_cuts[lease_id] += 1
        return RequestPulse(left, is_waiting=False, cut=cut)

    async def load_weights(self, snapshot: WeightsSnapshot) -> WeightsAck:
        """The only ones."""
        return WeightsAck("", snapshot.version, 0.0, 0.0)


class Pool:
    """A verifier pool that grades in no time."""

    async def ping(self, after_s: float = 0.0) -> Pulse:
        await asyncio.sleep(after_s)
        return Pulse("none")

    async def verify(self, request: GradingRequest) -> tuple[Verdict, ...]:
        return (Verdict.scored(1.0),) * len(request.outputs)


async def joined(engines: list[Engine], *, overhead: int) -> dict[str, WorkerRegistry]:
    """Registries of these engines and of a pool."""
    registries = {
        name: WorkerRegistry(role_of(name), ping_interval_s=PING_S, kill=lambda handle: None)
        for name in (GENERATION, VERIFIER)
    }
    for number, each in enumerate(engines):
        info = WorkerInfo(
            f"e{number}", GENERATION, "node", 1, "", 64, each.num_places, overhead, 10**6
        )
        await registries[GENERATION].register(info, clock.Local(each))  # type: ignore[arg-type]
    rewards = Rewards(("math",), "", {}, 1, 1)
    pool = WorkerInfo("pool", VERIFIER, "node", 1, capacity=1e9, rewards=rewards)
    await registries[VERIFIER].register(pool, clock.Local(Pool()))  # type: ignore[arg-type]
    await registries[GENERATION].publish(WeightsSnapshot(FIRST, ()), timeout_s=60.0)
    return registries


async def sample(shape: Shape, kind: str, *, seed: int) -> Outcome:
    """All groups, by leases of this kind."""
    places = shape.num_places
    engines = [Engine(places, seed, tells=kind in (CUTS, FEW)) for _ in range(NUM_ENGINES)]
    registries = await joined(engines, overhead=8 if kind == FEW else CONFIG.overhead(places))
    plan = episodes.make_plan(episodes.Size(30.0, 1, num_batches=1, batch_size=1))
    pipeline = SlotPipeline(replace(plan, environment=None), registries.__getitem__)
    num_places = NUM_ENGINES * places
    room = asyncio.Semaphore(WAITING * num_places // shape.group_size)
    num_groups = shape.outputs_a_place * num_places // shape.group_size
    size = 1 if kind == SINGLE else shape.group_size

    async def outputs(ordinal: int, first: int) -> None:
        ledger = Ledger()
        ledger.admit(ordinal, num_samples=size, step=StepKey(0, 0))
        request = GenerationRequest(  # of outputs from the first on, said as the attempt
            ordinal, first, QUESTION.input_token_ids, size, SamplingContract(1.0, (1,), 10**6)
        )
        account = SlotAccount(ledger, ordinal)
        await pipeline.play(QUESTION, request, oldest=FIRST, account=account)

    async def group(ordinal: int) -> None:
        async with room:
            firsts = range(0, shape.group_size, size)
            await asyncio.gather(*map(partial(outputs, ordinal), firsts))

    await asyncio.gather(*map(group, range(num_groups)))
    until_s = max(engine.asked_s for engine in engines)
    return Outcome(places, now_s(), until_s, tuple(engine.held for engine in engines))


def figures_of(shape: Shape) -> list[Figure]:
    """All kinds beside each other, with the same lengths."""
    found = {
        kind: [clock.run(sample(shape, kind, seed=seed)) for seed in range(shape.num_seeds)]
        for kind in (WHOLE, CUTS, FEW, SINGLE)
    }
    figures = []
    for kind, outcomes in found.items():
        at = f"{shape}, {kind}"
        figures.append(median(f"{at}: idle places", [each.idle for each in outcomes], "fraction"))
        for base in (WHOLE, CUTS):
            pairs = list(zip(found[base], outcomes, strict=True))
            if base == kind or kind == WHOLE:
                continue
            busier = [(1 - own.idle) / (1 - before.idle) for before, own in pairs]
            sooner = [before.seconds / own.seconds for before, own in pairs]
            figures += [
                median(f"{at}: throughput of {base}", busier, "x", better="higher"),
                median(f"{at}: to the last, of {base}", sooner, "x", better="higher"),
            ]
    return figures


@click.command()
@click.option("--quick", is_flag=True, help="the smallest shape alone")
@click.option("--json", "as_json", is_flag=True, help="print the figures as JSON")
@click.option("--results-dir", default=str(results.FOLDER), help=f"where {NAME}.json goes")
def main(quick: bool, as_json: bool, results_dir: str) -> None:
    """Compare what a lease is of."""
    shapes = SHAPES[:1] if quick else SHAPES
    figures = [figure for shape in shapes for figure in figures_of(shape)]
    shown = {figure.name: {"value": figure.value, "unit": figure.unit} for figure in figures}
    click.echo(json.dumps(shown, indent=1) if as_json else results.show(figures))
    results.write(NAME, figures, folder=Path(results_dir))


if __name__ == "__main__":
    main()
