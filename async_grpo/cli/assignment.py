"""Places a run's ranks and workers on devices and nodes, before `launch` starts anything.

What cannot be held there, by the bills of memory of `planning`, is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from async_grpo.cli.local_run import LocalRun
from async_grpo.cli.memory import (
    MEMORY_BYTES,
    NOTHING,
    check_memory,
    devices_in,
    fleet_here,
    needs_of,
)
from async_grpo.config.roles import ENGINES, GENERATION, JUDGE
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.devices.inventory import Inventory
from async_grpo.devices.placement import Demand, Placement, plan, plan_in_turns
from async_grpo.model.foreign_folders import stated_adapter
from async_grpo.util.errors import ConfigError
from async_grpo.weight_sync.routes import serving_adapters

if TYPE_CHECKING:
    from async_grpo.planning.asked import Fleet

OF_ENGINE, OF_SCORER = 4, 2  # weights of shares: an engine and a trainer hold more than a forward


def placed(
    run: LocalRun, inventory: Inventory, *, host_bytes: int = MEMORY_BYTES, starts: bool = True
) -> LocalRun:
    """The run with a device of this machine, or a share of one, for each rank and worker.

    A run on another cluster gets none. Raises `ConfigError` when the devices do not suffice, or,
    where it `starts`, a device or this machine holds too little, and `UnfitModel` for an adapter's
    folder that holds none.
    """
    adapter = stated_adapter(run.train.adapter)
    workers = serving_adapters(run.train, adapter, run.workers, on_cpu=not inventory.devices)
    if run.train.memory.colocated:
        workers = tuple(replace(w, colocated=w.mode == GENERATION) for w in workers)
    if workers != run.workers:
        run = replace(run, workers=workers)
    if run.ray_address:
        return run
    if run.trainer_nodes > 1:
        raise ConfigError(
            f"--trainer-nodes must be 1 without --ray-address, got {run.trainer_nodes}: name the "
            "cluster that has the machines, or --emit the job of a queue (docs/cluster.md)"
        )
    fleet = fleet_here(inventory)
    found = placed_on(run, fleet)
    if starts:
        check_memory(found, fleet, host_bytes=host_bytes)
    return replace(found, placement=f"{inventory} here; {found.placement}")


def placed_on(run: LocalRun, fleet: Fleet) -> LocalRun:
    """The run placed on the devices of machines, which need not be here.

    Shares of a device are those that the bills need; what is left of it goes to engines' caches.
    """
    found = plan_on(fleet.nodes, run, needs=needs_of(run, fleet))
    ranks, *others = found.placed
    with_devices = iter(others)
    workers = list(run.workers)
    for number, config in enumerate(workers):
        if config.num_devices:
            own = next(with_devices)
            workers[number] = replace(config, num_workers=own.count, gpus_per_worker=own.share)
    return replace(
        run,
        train=run.train.but(gpus_per_rank=ranks.share),
        workers=tuple(workers),
        num_ranks=ranks.count,
        num_devices=fleet.num_devices,
        placement=found.sentence,
    )


def plan_on(
    nodes: Sequence[int], run: LocalRun, *, needs: Mapping[int | None, float] = NOTHING
) -> Placement:
    """Place a run's ranks and workers on machines of so many devices; `launch` has one.

    `needs`: the least share of a device by the number of a worker's table, None for ranks.
    Raises `ConfigError` when the devices do not suffice.
    """
    ranks = Demand(
        "trainer rank", run.num_ranks, share=run.train.memory.gpus_per_rank, weight=OF_ENGINE,
        need=needs.get(None, 0.0),
    )  # fmt: skip
    tables = enumerate(run.workers)
    demands = [_demand(each, needs.get(number, 0.0)) for number, each in tables if each.num_devices]
    demands = [each for each in demands if each.count]
    if run.train.memory.colocated:
        return plan_in_turns(nodes, ranks=ranks, workers=demands, engines=f"{GENERATION} worker")
    return plan(nodes, ranks=ranks, workers=demands)


def _demand(config: WorkerConfig, need: float) -> Demand:
    return Demand(
        f"{config.role} worker",
        config.num_workers,
        devices=config.num_devices,
        share=config.gpus_per_worker,
        weight=OF_ENGINE if config.mode in ENGINES else OF_SCORER,
        need=need,
        fills=config.mode in (GENERATION, JUDGE),
    )


def described(run: LocalRun, devices: str) -> str:
    """How a run would be placed on machines of such devices, as `devices_in` reads them.

    A line a seat, for people: Ray may number the devices of a node otherwise. Raises `ConfigError`
    where a device holds too little.
    """
    fleet = devices_in(devices)
    check_memory(placed_on(run, fleet), fleet)
    found = plan_on(fleet.nodes, run, needs=needs_of(run, fleet))
    lines = [found.sentence]
    for seat in found.seats:
        place = f"device {', '.join(map(str, seat.devices))}" if seat.devices else "CPU"
        share = f", {seat.share:.0%} of it" if seat.share < 1 else ""
        lines.append(f"  {seat.who:<24} machine {seat.node}, {place}{share}")
    return "\n".join(lines)


def of_a_job(run: LocalRun, devices: str) -> tuple[int, ...]:
    """Devices of each machine of a job, as many as the least of `devices` has; refuses too few."""
    given = devices_in(devices).nodes
    machines = (min(given),) * len(given)
    plan_on(machines, run)
    return machines


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, with its free devices and CPUs."""

    node_id: str
    host: str
    devices: int
    cpus: float  # each worker takes one


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What one dispatcher starts on one node."""

    worker: int  # which [[worker]] table
    node: Node
    count: int
    share: float = 1.0  # of each of its devices


def dispatches(run: LocalRun, nodes: Sequence[Node]) -> list[Dispatch]:
    """A dispatcher for each table, on as many nodes as its workers need; the first have the ranks.

    Workers take whole nodes' devices from the last node back, those without a device the CPUs of
    the first node that has some left. Raises `ConfigError` when devices do not suffice.
    """
    if len(nodes) == 1:
        counts = enumerate(config.num_workers for config in run.workers)
        return [Dispatch(worker, nodes[0], count) for worker, count in counts]
    has_devices = any(node.devices for node in nodes)
    on_devices = [*_on_devices(run, nodes)] if has_devices else []
    placed = {each.worker for each in on_devices}
    cpus = {node.node_id: node.cpus for node in nodes}
    for each in on_devices:
        cpus[each.node.node_id] -= each.count
    rest = [number for number in range(len(run.workers)) if number not in placed]
    others = [each for number in rest for each in _on_cpus(run, number, nodes, cpus)]
    return sorted([*on_devices, *others], key=lambda each: each.worker)


def _on_devices(run: LocalRun, nodes: Sequence[Node]) -> Iterator[Dispatch]:
    ranks_each = run.num_ranks // run.trainer_nodes
    if not nodes[0].devices:  # its ranks take devices of which Ray was not told
        run = replace(run, num_ranks=0)
    found = plan_on([node.devices for node in nodes], run)
    seats = iter(found.seats)
    ranks, *others = found.placed
    of_ranks = Counter(next(seats).node for _ in range(ranks.count))
    if run.trainer_nodes > 1 and of_ranks != dict.fromkeys(range(run.trainer_nodes), ranks_each):
        raise ConfigError(
            f"--nproc-per-node must be all devices of each of {run.trainer_nodes} trainer nodes, "
            f"got {ranks_each}, and the cluster has {[node.devices for node in nodes]} free: "
            "set it to what they have, or lower --trainer-nodes or num_workers"
        )
    if run.trainer_nodes == 1 and (strays := ranks.count - of_ranks[0]):
        raise ConfigError(
            f"the trainer's {ranks.count} ranks must be on this machine, which has "
            f"{nodes[0].devices} free devices, {strays} too few: lower --nproc-per-node, "
            "launch it on another node, or start the ranks with torchrun (docs/cluster.md)"
        )
    with_devices = [number for number, each in enumerate(run.workers) if each.num_devices]
    for number, demand in zip(with_devices, others, strict=True):
        own = [next(seats) for _ in range(demand.count)]
        for index, node in enumerate(nodes):
            if here := [seat for seat in own if seat.node == index]:
                yield Dispatch(number, node, len(here), here[0].share)


def _on_cpus(
    run: LocalRun, number: int, nodes: Sequence[Node], cpus: dict[str, float]
) -> Iterator[Dispatch]:
    """`cpus`: free CPUs by node, which this lowers; workers without room go to the first node."""
    left = run.workers[number].num_workers
    for node in nodes:
        count = min(left, int(cpus[node.node_id]))
        if count > 0:
            cpus[node.node_id] -= count
            left -= count
            yield Dispatch(number, node, count)
    if left:
        yield Dispatch(number, nodes[0], left)


def in_words(run: LocalRun, found: Sequence[Dispatch]) -> str:
    """The dispatchers in a sentence.

    >>> from types import SimpleNamespace
    >>> run = SimpleNamespace(workers=[SimpleNamespace(role="generation")])
    >>> in_words(run, [Dispatch(0, Node("a", "10.0.0.2", 8, 8), 8)])
    '8 generation on 10.0.0.2'
    """
    told = (f"{each.count} {run.workers[each.worker].role} on {each.node.host}" for each in found)
    return ", ".join(told)


def dispatched(run: LocalRun, found: Sequence[Dispatch]) -> LocalRun:
    """The run with a [[worker]] table for each dispatcher, which has its count and its share."""
    workers = []
    for each in found:
        config = run.workers[each.worker]
        share = each.share if config.num_devices else config.gpus_per_worker
        workers.append(replace(config, num_workers=each.count, gpus_per_worker=share))
    return replace(run, workers=tuple(workers))
