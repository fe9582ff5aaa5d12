"""Places a run's ranks and workers on devices and nodes, before `launch` starts anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from async_grpo.cli.local_run import LocalRun
from async_grpo.config.roles import ENGINES, GENERATION
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.devices.inventory import Inventory
from async_grpo.devices.placement import Demand, Placement, plan, plan_in_turns
from async_grpo.model.foreign_folders import stated_adapter
from async_grpo.util.errors import ConfigError
from async_grpo.weight_sync.routes import serving_adapters

OF_ENGINE, OF_SCORER = 4, 2  # weights of shares: an engine and a trainer hold more than a forward


def placed(run: LocalRun, inventory: Inventory) -> LocalRun:
    """The run with a device of this machine, or a share of one, for each rank and worker.

    A run on another cluster gets none. Raises `ConfigError` when the devices do not suffice, and
    `UnfitModel` for an adapter's folder that holds none.
    """
    adapter = stated_adapter(run.train.adapter)
    workers = serving_adapters(run.train, adapter, run.workers, on_cpu=not inventory.devices)
    if run.train.memory.colocated:
        workers = tuple(replace(w, colocated=w.mode == GENERATION) for w in workers)
    if workers != run.workers:
        run = replace(run, workers=workers)
    if run.ray_address:
        return run
    found = placed_on(run, [len(inventory.devices)])
    return replace(found, placement=f"{inventory} here; {found.placement}")


def placed_on(run: LocalRun, nodes: Sequence[int]) -> LocalRun:
    """The run placed on machines of so many devices each, which need not be here."""
    found = plan_on(nodes, run)
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
        num_devices=sum(nodes),
        placement=found.sentence,
    )


def plan_on(nodes: Sequence[int], run: LocalRun) -> Placement:
    """Place a run's ranks and workers on machines of so many devices; `launch` has one.

    Raises `ConfigError` when the devices do not suffice.
    """
    ranks = Demand(
        "trainer rank", run.num_ranks, share=run.train.memory.gpus_per_rank, weight=OF_ENGINE
    )
    demands = [each for each in map(_demand, run.workers) if each.count]
    if run.train.memory.colocated:
        return plan_in_turns(nodes, ranks=ranks, workers=demands, engines=f"{GENERATION} worker")
    return plan(nodes, ranks=ranks, workers=demands)


def _demand(config: WorkerConfig) -> Demand:
    return Demand(
        f"{config.role} worker",
        config.num_workers if config.num_devices else 0,
        devices=config.num_devices,
        share=config.gpus_per_worker,
        weight=OF_ENGINE if config.mode in ENGINES else OF_SCORER,
    )


def described(run: LocalRun, devices: str) -> str:
    """How a run would be placed on machines of so many devices, as `devices_in` reads them.

    A line a seat, for people: Ray may number the devices of a node otherwise.
    """
    found = plan_on(devices_in(devices), run)
    lines = [found.sentence]
    for seat in found.seats:
        place = f"device {', '.join(map(str, seat.devices))}" if seat.devices else "CPU"
        share = f", {seat.share:.0%} of it" if seat.share < 1 else ""
        lines.append(f"  {seat.who:<24} machine {seat.node}, {place}{share}")
    return "\n".join(lines)


def devices_in(text: str) -> tuple[int, ...]:
    """Devices of each machine; raises `ConfigError` unless the text is numbers and commas.

    >>> devices_in("8,8")
    (8, 8)
    """
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--plan-for must be the devices of each machine, such as 8 or 8,8, got {text!r}"
        ) from None


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
    """A dispatcher for each table, on as many nodes as its workers need; `nodes[0]` has the ranks.

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
    if not nodes[0].devices:  # its ranks take devices of which Ray was not told
        run = replace(run, num_ranks=0)
    found = plan_on([node.devices for node in nodes], run)
    seats = iter(found.seats)
    ranks, *others = found.placed
    if strays := [seat for _, seat in zip(range(ranks.count), seats, strict=False) if seat.node]:
        raise ConfigError(
            f"the trainer's {ranks.count} ranks must be on this machine, which has "
            f"{nodes[0].devices} free devices, {len(strays)} too few: lower --nproc-per-node, "
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
