"""What the control process costs: samples, asked turns and leases a second, and their CPU.

The `Controller` is the real actor on a cluster of its own, with one change: it tells what it has
computed, and where (the profiles on the screen count their calls). Workers answer at once, ranks
train nothing. What a group, a sample and a rank's request cost follows from three runs that differ
in their numbers; what a ping costs, from many workers that have nothing to do.
"""

from __future__ import annotations

import asyncio
import cProfile
import io
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import ray

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.records import BatcherPlan
from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import BatchedActor, Calls
from async_grpo.config.roles import GENERATION, VERIFIER, role_of, teacher
from async_grpo.config.train_config import TrainConfig
from async_grpo.controller.controller import Controller
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.data.order import QuestionStream
from async_grpo.types import (
    EndOfStep,
    GenerationRequest,
    GradingRequest,
    Pulse,
    Question,
    RunId,
    SamplingContract,
    Turn,
    Verdict,
    VersionSpan,
    WeightsAck,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)
from async_grpo.util.deadlines import PING_S
from benchmarks import results, stack
from benchmarks.results import Figure, median
from benchmarks.scaling.hardware import PARTS

NAME = "control_plane"
GROUP = 8  # samples of a question
LARGE_GROUP = 32
NUM_RANKS, MANY_RANKS = 64, 512
NUM_WORKERS = 8  # of each role
AT_ONCE = 64  # turns that are asked at a time
MATH = teacher("math")
PLAYED = (GENERATION, MATH, VERIFIER)
PROFILE_LINES = 12
TIMEOUT_S = 300.0
FIRST = WeightsVersion(0, 0)
# Twice and half of what batcher and registry, as processes of their own (commit 23aa310f), took on
# the machine of the results: 1,820/s and 550 us.
SAMPLES_GOAL, SAMPLE_GOAL_US = 3_640.0, 275.0
TURN_GOAL_US, LEASES_GOAL = 1_500.0, 10_000.0
OPTIONS = {"num_cpus": 0, "max_concurrency": 10_000}
NUM_QUESTIONS = 256
QUESTION = Question(
    np.arange(64, dtype=np.int32), "use 2 9 8 to make 15\n", "15", {"target": 15, "nums": [2, 9, 8]}
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything is measured."""

    num_turns: int = 2_048
    num_leases: int = 32_768
    num_batches: int = 6
    batch_size: int = 128
    repeats: int = 3
    num_pinged: int = 384
    idle_s: float = 10.0


QUICK = Size(
    num_turns=256,
    num_leases=2_048,
    num_batches=2,
    batch_size=32,
    repeats=1,
    num_pinged=64,
    idle_s=5.0,
)


@click.command()
@click.option("--quick", is_flag=True, help="a small size, which proves that everything runs")
@click.option("--results-dir", default=str(results.FOLDER), help="where control_plane.json goes")
def main(quick: bool, results_dir: str) -> None:
    """Measure the controller."""
    size = QUICK if quick else Size()
    click.echo(f"{results.machine()}, {results.load()}")
    with tempfile.TemporaryDirectory() as folder, stack.start(Path(folder)) as running:
        os.environ["RAY_AUTH_MODE"] = running.environment["RAY_AUTH_MODE"]
        Cluster.join(running.environment["RAY_ADDRESS"], namespace=NAME)
        try:
            figures = turn_figures(size) + sample_figures(size)
            figures += lease_figures(size) + ping_figures(size)
        finally:
            ray.shutdown()
    click.echo("\n" + results.show(figures))
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}, {results.load()}")


def turn_figures(size: Size) -> list[Figure]:
    """Turns a second that another process asks of one role."""
    controller, player, run = make_run(batch_size=1)
    asker = ray.remote(Asker).options(**OPTIONS).remote(controller, run)

    async def turns() -> None:
        await controller.heard.remote(run)  # a run of which nothing is heard is ended
        await asker.ask.remote(size.num_turns)

    walls, costs = measured(turns, {"controller": controller, "asker": asker}, size.repeats)
    profile("controller that is asked", controller, turns())
    end(controller, player, asker)
    figures = [median("turns", [size.num_turns / wall for wall in walls], "1/s", better="higher")]
    spent = {who: [1e6 * each / size.num_turns for each in costs[who]] for who in costs}
    figures += [median(f"a turn, CPU of the {who}", each, "us") for who, each in spent.items()]
    both = [sum(each) for each in zip(*spent.values(), strict=True)]
    return [*figures, median("a turn, CPU of both", both, "us", goal=TURN_GOAL_US)]


def sample_figures(size: Size) -> list[Figure]:
    """Samples a second through the batcher to many ranks, and what they cost."""
    shapes = ((GROUP, NUM_RANKS), (GROUP, MANY_RANKS), (LARGE_GROUP, NUM_RANKS))
    costs = [batches(size, group=group, num_ranks=ranks) for group, ranks in shapes]
    first, num = costs[0], size.batch_size * GROUP
    spent = [1e6 * second / num for second in first.cpu]
    rates = [num / wall for wall in first.walls]
    counts = [(size.batch_size, size.batch_size * group, cost.num_asked)
              for (group, _), cost in zip(shapes, costs, strict=True)]  # fmt: skip
    parts = np.linalg.solve(counts, [statistics.median(cost.cpu) for cost in costs])
    return [
        median(f"samples to {NUM_RANKS} ranks", rates, "1/s", better="higher", goal=SAMPLES_GOAL),
        median("a sample, CPU of the controller", spent, "us", goal=SAMPLE_GOAL_US),
        *(
            Figure(f"{part}, CPU of the controller", 1e6 * float(seconds), "us")
            for part, seconds in zip(PARTS, parts, strict=True)
        ),
    ]


@dataclass(frozen=True, slots=True)
class Batches:
    """What a batch took: seconds, CPU seconds of the controller, requests of ranks."""

    walls: list[float]
    cpu: list[float]
    num_asked: float


def batches(size: Size, *, group: int, num_ranks: int) -> Batches:
    """Batches of so many samples a question to so many ranks, in turns."""
    controller, player, run = make_run(batch_size=size.batch_size, group=group, num_ranks=num_ranks)
    ranks = Ranks(controller, run, num_ranks=num_ranks)
    asyncio.run(ranks.train(num_batches=2))  # the first ones fill the window
    before = ranks.num_asked
    walls, costs = measured(
        lambda: ranks.train(num_batches=size.num_batches), {"controller": controller}, size.repeats
    )
    asked = ranks.num_asked - before
    work = ranks.train(num_batches=size.num_batches)
    profile(f"{num_ranks} ranks, {group} samples a question", controller, work)
    end(controller, player)
    num = size.num_batches
    return Batches(
        [wall / num for wall in walls], [cpu / num for cpu in costs["controller"]],
        asked / num / size.repeats,
    )  # fmt: skip


def ping_figures(size: Size) -> list[Figure]:
    """What a ping of a worker costs, by two runs that wait with few workers and with many."""
    costs = {}
    for num_workers in (NUM_WORKERS, size.num_pinged):
        controller, player, run = make_run(batch_size=1, num_workers=num_workers)

        async def wait(controller: Any = controller, run: RunId = run) -> None:
            await controller.heard.remote(run)
            await asyncio.sleep(size.idle_s)

        asyncio.run(wait())  # the first questions are answered
        _, spent = measured(wait, {"controller": controller}, size.repeats)
        costs[num_workers] = spent["controller"]
        end(controller, player)
    few, many = costs.values()
    pings = len(PLAYED) * (size.num_pinged - NUM_WORKERS) * size.idle_s / PING_S
    each = [1e6 * (own - other) / pings for own, other in zip(many, few, strict=True)]
    return [median("a ping, CPU of the controller", each, "us")]


def lease_figures(size: Size) -> list[Figure]:
    """Leases a second of one registry in this process, on the least loaded of its workers."""
    rates, spent = zip(
        *(asyncio.run(lease(size.num_leases)) for _ in range(size.repeats)), strict=True
    )
    return [
        median("leases", rates, "1/s", better="higher", goal=LEASES_GOAL),
        median("a lease, CPU", spent, "us"),
    ]


async def lease(number: int) -> tuple[float, float]:
    """Leases a second, and microseconds of CPU each; half of the askers wait in line."""
    registry = WorkerRegistry(role_of(MATH), kill=print)
    capacity = AT_ONCE / NUM_WORKERS / 2
    for n in range(NUM_WORKERS):
        info = WorkerInfo(f"{MATH}-{n}", MATH, "node", 0, "model", capacity=capacity)
        await registry.register(info, Here(Player()))

    async def work() -> None:
        for _ in range(number // AT_ONCE):
            async with registry.lease(1.0, timeout_s=TIMEOUT_S):
                await asyncio.sleep(0)

    started, started_cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    for member in registry.members:
        registry.deregister(member.info.worker_id)
    return number / seconds, 1e6 * cpu_seconds / number


class Here:
    """A handle of an object of this process."""

    def __init__(self, actor: object) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor, name))


def measured(
    work: Callable[[], Coroutine[Any, Any, None]], actors: dict[str, Any], repeats: int
) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds of each repeat, and CPU seconds that it cost each actor."""
    walls: list[float] = []
    costs: dict[str, list[float]] = {who: [] for who in actors}
    for _ in range(repeats):
        before = {who: get(actor.cpu_seconds.remote()) for who, actor in actors.items()}
        started = time.perf_counter()
        asyncio.run(work())
        walls.append(time.perf_counter() - started)
        for who, actor in actors.items():
            costs[who].append(get(actor.cpu_seconds.remote()) - before[who])
    return walls, costs


def profile(title: str, actor: Any, work: Coroutine[Any, Any, None]) -> None:
    """Where the actor's event loop spends its time; profiling makes Python seem dearer."""
    get(actor.start_profile.remote())
    asyncio.run(work)
    text: str = get(actor.stop_profile.remote(PROFILE_LINES))
    click.echo(f"\nprofile of the {title}, by own time\n{text}")


class Watched(BatchedActor):
    """What an actor tells of itself besides its work."""

    _profile: cProfile.Profile | None = None

    async def cpu_seconds(self) -> float:
        """Of all threads of its process."""
        return time.process_time()

    async def start_profile(self) -> None:
        """Profile the thread of its event loop."""
        self._profile = cProfile.Profile()
        self._profile.enable()

    async def stop_profile(self, num_lines: int) -> str:
        """The functions that took most, by their own time."""
        assert self._profile is not None
        self._profile.disable()
        text = io.StringIO()
        pstats.Stats(self._profile, stream=text).strip_dirs().sort_stats(
            os.environ.get("SORT", "tottime")
        ).print_stats(num_lines)
        return "\n".join(line for line in text.getvalue().splitlines()[6:] if line)


class WatchedController(Watched, Controller):
    """The controller."""


class Asker(Watched):
    """Asks as an environment worker does."""

    def __init__(self, controller: Any, run: RunId) -> None:
        self._controller = Calls(controller)
        self._run = run

    async def ask(self, num_turns: int) -> None:
        """So many turns, some at a time."""

        async def episode() -> None:
            for _ in range(num_turns // AT_ONCE):
                await self._controller.ask("ask", self._run, MATH, "turn", 7, cost=1.0)

        await asyncio.gather(*(episode() for _ in range(AT_ONCE)))


class Player(Watched):
    """Plays all workers, and the verifiers too: it knows every answer before it is asked."""

    def __init__(self, num_output_tokens: int = 256) -> None:
        self._token_ids = np.arange(num_output_tokens, dtype=np.int32) % 100
        self._logprobs = np.full(num_output_tokens, -1.0, np.float32)
        self._version = FIRST

    async def ping(self, after_s: float = 0.0) -> Pulse:
        await asyncio.sleep(after_s)
        return Pulse("none")

    async def abort_all(self) -> None:
        return None

    async def load_weights(self, snapshot: WeightsSnapshot) -> WeightsAck:
        self._version = snapshot.version
        return WeightsAck("all", snapshot.version, 0.0, 0.0)

    async def generate(self, request: GenerationRequest) -> tuple[Turn, ...]:
        """Outputs that differ in their first token."""
        return tuple(
            Turn(
                np.concatenate([[np.int32(index)], self._token_ids[1:]], dtype=np.int32),
                self._logprobs.copy(),
                (VersionSpan(self._version, 0, len(self._token_ids)),),
                "stop",
                "8-2+9=15",
            )
            for index in range(request.num_samples)
        )

    async def verify(self, request: GradingRequest) -> tuple[Verdict, ...]:
        """Every reward of a group is another one: all samples are trained."""
        return tuple(Verdict.scored(output.index, adapter="played") for output in request.outputs)

    async def turn(self, number: int) -> int:
        """What an asker waits for."""
        return number

    async def until_death(self) -> None:
        """It plays the run's witness too."""
        await asyncio.Future()


def make_run(
    *,
    batch_size: int,
    questions: Sequence[Question] = (QUESTION,) * NUM_QUESTIONS,
    num_ranks: int = NUM_RANKS,
    group: int = GROUP,
    num_workers: int = NUM_WORKERS,
) -> tuple[Any, Any, RunId]:
    """A controller, its workers that all are one player, and a run without end."""
    player = ray.remote(Player).options(**OPTIONS).remote()
    controller = ray.remote(WatchedController).options(**OPTIONS).remote("benchmark")
    infos = [
        WorkerInfo(f"{role}-{n}", role, "node", 0, "model", 128, 256.0, group, 512)
        for role in PLAYED
        for n in range(num_workers)
    ]
    get([controller.register.remote(info, player) for info in infos])
    plan = make_plan(batch_size=batch_size, questions=questions, num_ranks=num_ranks, group=group)
    run = RunId(plan.incarnation, get(controller.begin_run.remote(plan, player, None)))
    publish = controller.publish.remote(run, WeightsSnapshot(FIRST, ()), (GENERATION,), TIMEOUT_S)
    get(publish)
    get(controller.published.remote(run, FIRST))
    return controller, player, run


def make_plan(
    *, batch_size: int, questions: Sequence[Question], num_ranks: int, group: int
) -> BatcherPlan:
    """A run without end."""
    config = TrainConfig(
        model_name_or_path="none",
        data_path="none",
        batch_size=batch_size,
        num_training_batches=10**6,
        samples_per_question=group,
        max_generation_tokens=256,
        max_tokens_per_gpu=4096,
        max_staleness=1,
        dump_samples_filename="",
    )
    return BatcherPlan(
        config=config,
        rules=LocalRules(find_algorithm(config)),
        questions=questions,
        held_out=(),
        order=QuestionStream(len(questions), seed=0).index,
        replacement=lambda slot, *, attempt: slot,
        seed_of=None,
        sampling=SamplingContract(1.0, (1,), config.sampling.max_generation_tokens),
        num_ranks=num_ranks,
        incarnation=FIRST.incarnation,
    )


class Ranks:
    """Ranks that train nothing: they ask as real ones do, and rank 0 publishes."""

    def __init__(self, controller: Any, run: RunId, *, num_ranks: int = NUM_RANKS) -> None:
        self._controller = controller
        self._run = run
        self._ranks = range(num_ranks)
        self._index = 0
        self.num_asked = 0

    async def train(self, *, num_batches: int) -> None:
        """So many batches more."""
        controller, run = self._controller, self._run
        asked = self._ask()
        while num_batches:
            await asyncio.sleep(0)
            controller.hungry.remote(run, self._index)
            (*_, item), *_ = await asyncio.gather(*asked)
            self._index += 1
            asked = self._ask()
            if isinstance(item, EndOfStep) and item.is_last_of_batch:
                num_batches -= 1
                version = FIRST._replace(batches=item.batch + 1)
                snapshot = WeightsSnapshot(version, ())
                await controller.publish.remote(run, snapshot, (GENERATION,), TIMEOUT_S)
                await controller.published.remote(run, version)
                await controller.heard.remote(run)

    def _ask(self) -> list[Any]:
        self.num_asked += len(self._ranks)
        return [
            self._controller.next_items.remote(self._run, rank, self._index) for rank in self._ranks
        ]


def end(*actors: Any) -> None:
    """They are not needed any more."""
    for actor in actors:
        ray.kill(actor)


def get(reference: Any) -> Any:
    """What an actor answers."""
    return ray.get(reference, timeout=TIMEOUT_S)


if __name__ == "__main__":
    main()
