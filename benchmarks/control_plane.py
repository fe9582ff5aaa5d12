"""How many decisions the control plane makes a second, and what one more sample costs it.

First its pure cores in this process: decisions a CPU second with 1,000 workers, and the cost of one
more sample with 1,000 to 1,000,000 in flight, which must stay flat. Then its real actors over Ray:
leases with calls one by one and in bundles, samples through the batcher to 64 ranks, verdicts by
number of slots, and where registry, batcher and pool spend their time.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import ray

from async_grpo import cluster
from benchmarks import control_cores, procfs, results, stack
from benchmarks import control_services as services
from benchmarks.alternation import alternate, ratios
from benchmarks.control_cores import CORES, GROUP, NUM_WORKERS, Core, Work
from benchmarks.results import Figure, median
from benchmarks.stack import Stack

NAME = "control_plane"
GOAL_DECISIONS_PER_S = 50_000
GOAL_FLAT = 1.2
NUM_RANKS = 64
AT_ONCE = 64  # leases that are wanted at a time
PROFILE_LINES = 12
GRADERS = {"scattered": "cheap", "asleep": "sleeping 10 ms", "busy": "computing 10 ms"}


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything is measured."""

    in_flight: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    num_samples: int = 32_768  # more, of each core and turn
    num_leases: int = 2_048
    num_batches: int = 6
    batch_size: int = 128
    slots: tuple[int, ...] = (1, 2, 4)
    num_verdicts: int = 2_048  # by the cheap grader; an eighth by the others
    repeats: int = 3
    core_repeats: int = 7


QUICK = Size(
    in_flight=(1_000, 10_000),
    num_samples=1_024,
    num_leases=256,
    num_batches=2,
    batch_size=32,
    slots=(1, 2),
    num_verdicts=128,
    repeats=1,
    core_repeats=1,
)


@click.command()
@click.option("--quick", is_flag=True, help="a small size, which proves that everything runs")
@click.option("--results-dir", default=str(results.FOLDER), help="where control_plane.json goes")
def main(quick: bool, results_dir: str) -> None:
    """Measure registry, batcher and verifier pool."""
    size = QUICK if quick else Size()
    click.echo(f"{results.machine()}, {results.load()}")
    figures = [figure for name, core in CORES.items() for figure in core_figures(name, core, size)]
    figures += desk_figures(size)
    click.echo(results.show(figures))
    with tempfile.TemporaryDirectory() as folder, stack.start(Path(folder)) as running:
        figures += over_ray(running, size)
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}, {results.load()}")


def core_figures(name: str, core: Core, size: Size) -> list[Figure]:
    """Decisions a second of one core, the memory and the cost of a sample by those in flight."""
    filled: dict[str, Work] = {}
    memory: dict[str, float] = {}
    for num in size.in_flight:
        before = procfs.usage(os.getpid())
        filled[f"{num:,}"] = core(num)
        after = procfs.usage(os.getpid())
        if before and after:
            memory[f"{num:,}"] = (after.rss_bytes - before.rss_bytes) / num
    least, most = f"{size.in_flight[0]:,}", f"{size.in_flight[-1]:,}"
    spent = alternate(
        {num: partial(_timed, work, size.num_samples) for num, work in filled.items()},
        repeats=size.core_repeats,
    )
    figures = [
        median(
            f"{name}, decisions a CPU second", [num / s for num, s in spent[least]], "1/s",
            better="higher", goal=GOAL_DECISIONS_PER_S,
        ),
        Figure(f"{name}, memory of a sample in flight", memory[most], "B"),
    ]  # fmt: skip
    cost = {num: [seconds for _, seconds in measured] for num, measured in spent.items()}
    figures += [
        median(
            f"{name}, one more sample at {num} / at {least}", ratios(cost[num], cost[least]), "x",
            goal=GOAL_FLAT,
        )
        for num in list(cost)[1:]
    ]  # fmt: skip
    return figures


def _timed(work: Work, num_samples: int) -> tuple[int, float]:
    """(decisions, CPU seconds)."""
    started = time.process_time()
    return work(num_samples), time.process_time() - started


def desk_figures(size: Size) -> list[Figure]:
    """The desk of a registry, with everybody who waits."""
    rates = []
    for _ in range(size.core_repeats):
        started = time.process_time()
        num = asyncio.run(control_cores.desk_decisions(size.num_samples))
        rates.append(num / (time.process_time() - started))
    goal = GOAL_DECISIONS_PER_S
    name = "desk, decisions a CPU second"
    return [median(name, rates, "1/s", better="higher", goal=goal)]


def over_ray(running: Stack, size: Size) -> list[Figure]:
    """What the real actors do."""
    os.environ["RAY_AUTH_MODE"] = running.environment["RAY_AUTH_MODE"]
    cluster.connect(running.environment["RAY_ADDRESS"], namespace=NAME)
    figures: list[Figure] = []
    try:
        for part in (lease_figures, sample_figures, verdict_figures):
            found = part(size)
            click.echo("\n" + results.show(found))
            figures += found
    finally:
        ray.shutdown()
    return figures


def lease_figures(size: Size) -> list[Figure]:
    """Leases a second of a registry with many workers, and what its workers' pings cost."""
    player = services.make_player()
    registry = services.make_registry(player, num_workers=NUM_WORKERS)
    options = {"num_leases": size.num_leases, "at_once": AT_ONCE}
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        way: lambda measured=measured: _run(measured(registry, **options), registry)
        for way, measured in (
            ("one by one", services.lease_one_by_one),
            ("bundled", services.lease_in_bundles),
        )
    }
    idle = _run(asyncio.sleep(6.0), registry)
    measured = alternate(ways, repeats=size.repeats)
    _profile("registry, bundled leases", registry, services.lease_in_bundles(registry, **options))
    services.end(registry, player)
    figures = [
        Figure(f"pings of {NUM_WORKERS:,} workers, share of a core", idle[1] / idle[0], "CPU s/s")
    ]
    for way, runs in measured.items():
        rates = [size.num_leases / wall for wall, _ in runs]
        costs = [1e6 * cpu / size.num_leases for _, cpu in runs]
        figures += [
            median(f"leases {way}", rates, "1/s", better="higher"),
            median(f"leases {way}, CPU of the registry", costs, "us/lease"),
        ]
    speeds = [
        single[1] / bundled[1]
        for single, bundled in zip(measured["one by one"], measured["bundled"], strict=True)
    ]
    name = "leases, CPU of the registry, one by one / bundled"
    return [*figures, median(name, speeds, "x", better="higher")]


def sample_figures(size: Size) -> list[Figure]:
    """Samples a second through a batcher to many ranks, and what they cost whom."""
    player = services.make_player()
    registry = services.make_registry(player, num_workers=8)
    batcher = services.make_batcher(
        registry, player, num_ranks=NUM_RANKS, batch_size=size.batch_size
    )
    services.get(batcher.published.remote(services.FIRST))
    ranks = services.Ranks(batcher, registry, num_ranks=NUM_RANKS)
    asyncio.run(ranks.train(num_batches=2))  # the first ones fill the window
    num = size.num_batches * size.batch_size * GROUP
    actors = {"batcher": batcher, "registry": registry}
    walls, costs = [], {who: list[float]() for who in actors}
    for _ in range(size.repeats):
        before = {who: services.get(actor.cpu_seconds.remote()) for who, actor in actors.items()}
        started = time.perf_counter()
        asyncio.run(ranks.train(num_batches=size.num_batches))
        walls.append(time.perf_counter() - started)
        for who, actor in actors.items():
            spent = services.get(actor.cpu_seconds.remote()) - before[who]
            costs[who].append(1e6 * spent / num)
    _profile(f"batcher, {NUM_RANKS} ranks", batcher, ranks.train(num_batches=size.num_batches))
    services.end(batcher, registry, player)
    rates = [num / wall for wall in walls]
    return [
        median(f"samples to {NUM_RANKS} ranks", rates, "1/s", better="higher"),
        *(median(f"a sample, CPU of the {who}", cost, "us") for who, cost in costs.items()),
    ]


def verdict_figures(size: Size) -> list[Figure]:
    """Verdicts a second by number of slots, and what they cost the pool's own process."""
    figures: list[Figure] = []
    for reward, title in GRADERS.items():
        num = size.num_verdicts if reward == "scattered" else size.num_verdicts // 8
        pools = {slots: services.make_pool(reward, num_slots=slots) for slots in size.slots}
        measured = alternate(
            {str(slots): partial(_verify, actor, num) for slots, actor in pools.items()},
            repeats=size.repeats,
        )
        if reward == "scattered":
            work = services.verify(pools[1], num_samples=num)
            _profile("pool, one slot, cheap grader", pools[1], work)
        services.end(*pools.values())
        figures += _by_slots(title, num, measured)
    return figures


def _verify(actor: Any, num_samples: int) -> tuple[float, float]:
    return _run(services.verify(actor, num_samples=num_samples), actor)


def _by_slots(title: str, num: int, measured: dict[str, list[tuple[float, float]]]) -> list[Figure]:
    figures = []
    for slots, runs in measured.items():
        at = f"verdicts, {title}, {slots} slots"
        rates = [num / wall for wall, _ in runs]
        costs = [1e6 * cpu / num for _, cpu in runs]
        figures += [
            median(at, rates, "1/s", better="higher"),
            median(f"{at}, CPU of the pool", costs, "us"),
        ]
    walls = {slots: [wall for wall, _ in runs] for slots, runs in measured.items()}
    cores = os.cpu_count() or 1
    figures += [
        median(
            f"verdicts, {title}, {slots} slots / 1", ratios(walls["1"], walls[slots]), "x",
            better="higher",
            goal=_goal(title, int(slots), cores),
        )
        for slots in list(walls)[1:]
    ]  # fmt: skip
    return figures


def _goal(title: str, slots: int, cores: int) -> float | None:
    """Nine tenths of how much faster so many slots can be: what computes needs a core each.

    A cheap grader needs less of a core than the pool does to hand it its samples: no goal.

    >>> [_goal("computing 10 ms", 4, 2), _goal("sleeping 10 ms", 4, 2), _goal("cheap", 4, 2)]
    [1.8, 3.6, None]
    """
    if title == "cheap":
        return None
    return 0.9 * (slots if title.startswith("sleeping") else min(slots, cores))


def _run(work: Any, actor: Any) -> tuple[float, float]:
    """Seconds that the work took, and CPU seconds that it cost the actor."""
    before, started = services.get(actor.cpu_seconds.remote()), time.perf_counter()
    asyncio.run(_awaited(work))
    wall = time.perf_counter() - started
    return wall, services.get(actor.cpu_seconds.remote()) - before


async def _awaited(work: Any) -> None:
    await work


def _profile(title: str, actor: Any, work: Any) -> None:
    """Where the actor's event loop spends its time; profiling makes Python seem dearer."""
    services.get(actor.start_profile.remote())
    asyncio.run(_awaited(work))
    text: str = services.get(actor.stop_profile.remote(PROFILE_LINES))
    click.echo(f"\nprofile of the {title}, by own time\n{text}")


if __name__ == "__main__":
    main()
