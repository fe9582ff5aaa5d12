"""What the control process costs: samples, asked turns and leases a second, and their CPU.

The controller is the real actor on a cluster of its own (`scripted_control`); the profiles on the
screen count the calls of its functions. What a group, a sample and a rank's request cost is fitted
to four runs that differ in their numbers; what a ping costs follows from many workers that have
nothing to do.
"""

from __future__ import annotations

import asyncio
import os
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

from async_grpo.cluster.cluster import Cluster
from async_grpo.config.roles import role_of
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.types import RunId, WorkerInfo
from async_grpo.util.deadlines import PING_S
from benchmarks import results, stack
from benchmarks.results import Figure, median
from benchmarks.scaling.hardware import PARTS
from benchmarks.scripted_control import (
    AT_ONCE,
    GROUP,
    MATH,
    NUM_RANKS,
    NUM_WORKERS,
    OPTIONS,
    PLAYED,
    TIMEOUT_S,
    Asker,
    Player,
    Ranks,
    end,
    get,
    make_run,
)

NAME = "control_plane"
SMALL_GROUP, LARGE_GROUP, MANY_RANKS = 2, 32, 512
PROFILE_LINES = 12
# Twice and half of what batcher and registry, as processes of their own (commit 23aa310f), took on
# the machine of the results: 1,820/s and 550 us.
SAMPLES_GOAL, SAMPLE_GOAL_US = 3_640.0, 275.0
TURN_GOAL_US, LEASES_GOAL = 1_500.0, 10_000.0


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
    groups = (GROUP, SMALL_GROUP, LARGE_GROUP)
    shapes = [(group, NUM_RANKS) for group in groups] + [(GROUP, MANY_RANKS)]
    costs = [batches(size, group=group, num_ranks=ranks) for group, ranks in shapes]
    first, num = costs[0], size.batch_size * GROUP
    spent = [1e6 * second / num for second in first.cpu]
    rates = [num / wall for wall in first.walls]
    counts = [(size.batch_size, size.batch_size * group, cost.num_asked)
              for (group, _), cost in zip(shapes, costs, strict=True)]  # fmt: skip
    parts = fitted(counts, [statistics.median(cost.cpu) for cost in costs])
    return [
        median(f"samples to {NUM_RANKS} ranks", rates, "1/s", better="higher", goal=SAMPLES_GOAL),
        median("a sample, CPU of the controller", spent, "us", goal=SAMPLE_GOAL_US),
        *(
            Figure(f"{part}, CPU of the controller", 1e6 * float(seconds), "us")
            for part, seconds in zip(PARTS, parts, strict=True)
        ),
    ]


def fitted(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Seconds of each kind of work, none below 0, by least squares of relative errors.

    >>> [round(each, 6) for each in fitted([(1, 8), (1, 16), (2, 8)], [10.0, 18.0, 12.0])]
    [2.0, 1.0]
    >>> fitted([(1, 1), (1, 2)], [1.0, 3.0])[0]  # -1 would fit
    0.0
    """
    shares = np.asarray(counts) / np.asarray(seconds)[:, None]
    kept = list(range(shares.shape[1]))
    while min(found := np.linalg.lstsq(shares[:, kept], np.ones(len(shares)))[0]) < 0:
        del kept[int(np.argmin(found))]
    return [float(found[kept.index(n)]) if n in kept else 0.0 for n in range(shares.shape[1])]


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


if __name__ == "__main__":
    main()
