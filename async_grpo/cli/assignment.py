"""Places a run's ranks and workers on devices and nodes, before `launch` starts anything.

What cannot be held there, by the bills of memory of `planning`, is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.cli.local_run import LocalRun
from async_grpo.config.roles import ENGINES, GENERATION, JUDGE
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.devices.inventory import Inventory
from async_grpo.devices.placement import Demand, Placement, plan, plan_in_turns
from async_grpo.model.foreign_folders import stated_adapter
from async_grpo.util.errors import ConfigError, UnfitModel
from async_grpo.weight_sync.routes import serving_adapters

if TYPE_CHECKING:
    from async_grpo.devices.bill import ModelShape
    from async_grpo.planning.asked import Asked, Fleet

CONFIG = "config.json"
ASSUMED_LONGEST = 32_768
MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # of this machine
LARGE_BATCHES = 70 << 30  # bytes of a device from which on vLLM's defaults are large
NOTHING: Mapping[int | None, float] = {}
OF_ENGINE, OF_SCORER = 4, 2  # weights of shares: an engine and a trainer hold more than a forward


def placed(run: LocalRun, inventory: Inventory, *, host_bytes: int = MEMORY_BYTES) -> LocalRun:
    """The run with a device of this machine, or a share of one, for each rank and worker.

    A run on another cluster gets none. Raises `ConfigError` when the devices do not suffice, or a
    device or this machine holds too little, and `UnfitModel` for an adapter's folder that holds
    none.
    """
    adapter = stated_adapter(run.train.adapter)
    workers = serving_adapters(run.train, adapter, run.workers, on_cpu=not inventory.devices)
    if run.train.memory.colocated:
        workers = tuple(replace(w, colocated=w.mode == GENERATION) for w in workers)
    if workers != run.workers:
        run = replace(run, workers=workers)
    if run.ray_address:
        return run
    fleet = fleet_here(inventory)
    found = placed_on(run, fleet)
    check_memory(found, fleet, host_bytes=host_bytes)
    return replace(found, placement=f"{inventory} here; {found.placement}")


def placed_on(run: LocalRun, fleet: Fleet) -> LocalRun:
    """The run placed on the devices of machines, which need not be here.

    Shares of a device are those that the bills need; what is left of it goes to engines' caches.
    """
    found = plan_on(fleet.nodes, run, needs=_needs(run, fleet))
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
    found = plan_on(fleet.nodes, run, needs=_needs(run, fleet))
    lines = [found.sentence]
    for seat in found.seats:
        place = f"device {', '.join(map(str, seat.devices))}" if seat.devices else "CPU"
        share = f", {seat.share:.0%} of it" if seat.share < 1 else ""
        lines.append(f"  {seat.who:<24} machine {seat.node}, {place}{share}")
    return "\n".join(lines)


def devices_in(text: str) -> Fleet:
    """The devices of machines, of an H100 each where no kind is named; raises `ConfigError`.

    >>> devices_in("8,8").nodes, devices_in("1xL4").kind.name
    ((8, 8), 'L4')
    """
    from async_grpo.planning.asked import H100, KINDS, Fleet

    counts, _, name = text.partition("x")
    try:
        nodes, kind = tuple(int(each) for each in counts.split(",")), KINDS[name or H100.name]
    except (ValueError, KeyError):
        raise ConfigError(
            f"--plan-for must be the devices of each machine, such as 8 or 8,8, and their kind as "
            f"in 8xA100 where it is none of H100, got {text!r}"
        ) from None
    return Fleet(tuple(each for each in nodes if each), kind)


def fleet_here(inventory: Inventory, *, measured: bool = False) -> Fleet:
    """The devices of this machine, or its cores, whose speed is `measured` where it matters."""
    from async_grpo.planning.asked import CPU, H100, KINDS, Fleet
    from async_grpo.planning.cores import num_threads, read_speed

    if devices := inventory.devices:
        names = [each.name for each in devices]
        kind = next((KINDS[kind] for kind in KINDS if any(kind in name for name in names)), H100)
        held = min(each.memory_mib for each in devices) << 20
        kind = replace(
            kind, name=names[0], memory_bytes=held or kind.memory_bytes,
            has_large_batches=kind.has_large_batches and held >= LARGE_BATCHES,
        )  # fmt: skip
        return Fleet((len(devices),), kind)
    core, threads = CPU, num_threads()
    if measured:
        speed = read_speed(threads=threads)
        core = replace(
            CPU, flops=speed.flops, bytes_per_s=speed.bytes_per_s, source="measured on these cores"
        )
    return Fleet((), core, num_cores=len(os.sched_getaffinity(0)), threads=threads)


def check_memory(run: LocalRun, fleet: Fleet, *, host_bytes: int = 0) -> None:
    """Raise `ConfigError` for a placed run that its devices or their machine cannot hold.

    Not asked are runs with --unchecked-memory, and those with a model of unknown sizes.
    """
    from async_grpo.planning.bills import TooLargeError, check_fits

    asked = _sized(run, fleet, host_bytes=host_bytes)
    if asked is None or run.train.memory.unchecked_memory:
        return
    try:
        check_fits(asked, as_placed=True)
    except TooLargeError as error:
        raise ConfigError(f"{error}; --unchecked-memory starts it all the same") from None
    except ConfigError:  # options that other checks refuse, in their words
        return


def _sized(run: LocalRun, fleet: Fleet, *, host_bytes: int = 0) -> Asked | None:
    """The run with the sizes of its models; None where one is not known yet, or is quantised."""
    from async_grpo.model.foreign_folders import quantization_of

    folders = [_folder(each.model_path) for each in run.workers if each.serves_model]
    packed = [each for each in folders if each and quantization_of(each)]
    if packed or any("quantization" in each.engine_options for each in run.workers):
        return None
    try:
        return asked_of(run, fleet, host_bytes=host_bytes)
    except UnfitModel:
        return None


def _needs(run: LocalRun, fleet: Fleet) -> Mapping[int | None, float]:
    """The least share of a device of the ranks and of each worker; empty: unknown, or none."""
    from async_grpo.planning.bills import least_bytes

    asked = _sized(run, fleet) if fleet.num_devices else None
    if asked is None:
        return NOTHING
    try:
        least = {number: least_bytes(asked, number) for number in (None, *asked.worker_models)}
    except ConfigError:  # see `check_memory`
        return NOTHING
    return {number: each / fleet.kind.memory_bytes for number, each in least.items()}


def asked_of(run: LocalRun, fleet: Fleet, *, shape_of: str = "", host_bytes: int = 0) -> Asked:
    """A run with the sizes of its models, for its bills; `host_bytes` of a machine, 0: unknown.

    Raises `UnfitModel` for a model whose sizes are not known.
    """
    from async_grpo.devices.bill import FLOAT32
    from async_grpo.model.foreign_folders import stated_adapter, stated_config
    from async_grpo.planning.asked import BF16, Asked
    from async_grpo.weight_sync.routes import serving_adapters

    with_model = {number: each for number, each in enumerate(run.workers) if each.serves_model}
    adapter = stated_adapter(run.train.adapter)
    workers = serving_adapters(run.train, adapter, run.workers, on_cpu=not fleet.num_devices)
    folder = _folder(run.train.places.model_name_or_path)
    stated = stated_config(folder) if folder else {}
    is_half = not folder or "bfloat16" in (stated.get("dtype"), stated.get("torch_dtype"))
    asked = Asked(
        train=run.train,
        workers=workers,
        num_ranks=run.num_ranks,
        model=read_shape(run.train.places.model_name_or_path, instead=shape_of),
        worker_models={
            number: read_shape(each.model_path, instead=shape_of)
            for number, each in with_model.items()
        },
        longest={
            number: each.max_model_len or read_positions(each.model_path) or ASSUMED_LONGEST
            for number, each in with_model.items()
        },
        fleet=fleet,
        host_bytes=host_bytes,
        stored_bytes=BF16 if is_half else FLOAT32,
    )
    return asked.adapted(adapter, run.train)


def read_shape(model: str, *, instead: str = "") -> ModelShape:
    """The sizes of a model: a folder, one in the hub's cache, or a published name; or `instead`.

    Weights are not read, and no network is asked. Raises `UnfitModel` for what is not known.
    """
    from async_grpo.model.model_folder import weights_size
    from async_grpo.planning.asked import published_config, shape_of_config, unknown_model

    folder = _folder(model)
    if folder is not None:
        size = weights_size(str(folder))
        try:
            config = json.loads((folder / CONFIG).read_text())
        except ValueError as error:
            raise UnfitModel(f"{folder / CONFIG} is no JSON: {error}") from None
        count = size.num_parameters if size else 0
        return shape_of_config(config, who=model, num_parameters=count)
    if config := published_config(model):
        return shape_of_config(config, who=model)
    if instead and instead != model:
        return read_shape(instead)
    raise unknown_model(model)


def read_positions(model: str) -> int:
    """The longest sequence that a model's config states; 0 where it does not, or is not here."""
    from async_grpo.model.model_folder import stated_positions

    folder = _folder(model)
    return (folder and stated_positions(folder)) or 0


def _folder(model: str) -> Path | None:
    """The folder that holds the model's config; None: there is none."""
    if (Path(model) / CONFIG).is_file():
        return Path(model)
    if Path(model).exists() or model.count("/") != 1 or model.startswith((".", "/")):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, CONFIG)
    return Path(found).parent if isinstance(found, str) else None


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
