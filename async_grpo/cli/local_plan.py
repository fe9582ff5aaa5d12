"""Who of a run of one machine gets which device: `launch` asks, before it starts anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from async_grpo.cli.local_run import LocalRun
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.devices.inventory import Inventory
from async_grpo.devices.placement import Demand, Plan, plan
from async_grpo.types.roles import GENERATION, JUDGE
from async_grpo.util.errors import ConfigError

OF_ENGINE, OF_SCORER = 4, 2  # weights of shares: an engine and a trainer hold more than a forward


def placed(run: LocalRun, inventory: Inventory) -> LocalRun:
    """The run with a device of this machine for everybody, or a share of one.

    On another cluster than its own devices are Ray's or the ranks' to find. Raises `ConfigError`
    when there is no way.
    """
    if run.ray_address:
        return run
    found = placed_on(run, [len(inventory.devices)])
    return replace(found, placement=f"{inventory} here; {found.placement}")


def placed_on(run: LocalRun, nodes: Sequence[int]) -> LocalRun:
    """The same for machines of so many devices, which need not be here."""
    found = plan_on(nodes, run)
    ranks, *others = found.placed
    with_devices = iter(others)
    workers = [
        _changed(config, next(with_devices)) if config.num_devices else config
        for config in run.workers
    ]
    return replace(
        run,
        train=replace(run.train, gpus_per_rank=ranks.share),
        workers=tuple(workers),
        num_ranks=ranks.count,
        num_devices=sum(nodes),
        placement=found.sentence,
    )


def plan_on(nodes: Sequence[int], run: LocalRun) -> Plan:
    """Place a run's ranks and workers on machines of so many devices; `launch` has one.

    Raises `ConfigError` when there is no way.
    """
    ranks = Demand("trainer rank", run.num_ranks, share=run.train.gpus_per_rank, weight=OF_ENGINE)
    demands = [_demand(config) for config in run.workers]
    return plan(nodes, ranks=ranks, workers=[each for each in demands if each.count])


def _changed(config: WorkerConfig, demand: Demand) -> WorkerConfig:
    return replace(config, num_workers=demand.count, gpus_per_worker=demand.share)


def _demand(config: WorkerConfig) -> Demand:
    return Demand(
        f"{config.role} worker",
        config.num_workers if config.num_devices else 0,
        devices=config.num_devices,
        share=config.gpus_per_worker,
        weight=OF_ENGINE if config.mode in (GENERATION, JUDGE) else OF_SCORER,
    )


def described(found: Plan) -> str:
    """A line a seat, for people: Ray may number the devices of a node otherwise."""
    lines = [found.sentence]
    for seat in found.seats:
        place = f"device {', '.join(map(str, seat.devices))}" if seat.devices else "CPU"
        share = f", {seat.share:.0%} of it" if seat.share < 1 else ""
        lines.append(f"  {seat.who:<24} machine {seat.node}, {place}{share}")
    return "\n".join(lines)


def devices_in(text: str) -> tuple[int, ...]:
    """Of each machine; raises `ConfigError` unless it is numbers with commas between them.

    >>> devices_in("8,8")
    (8, 8)
    """
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--plan-for must be the devices of each machine, such as 8 or 8,8, got {text!r}"
        ) from None
