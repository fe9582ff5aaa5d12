"""Who of a run of one machine gets which device: `launch` asks, before it starts anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from async_grpo.config.train import TrainConfig
from async_grpo.config.worker import WorkerConfig
from async_grpo.devices.placement import Demand, Plan, plan
from async_grpo.errors import ConfigError
from async_grpo.roles import GENERATION, JUDGE

OF_ENGINE, OF_SCORER = 4, 2  # weights of shares: an engine and a trainer hold more than a forward


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What the plan adds to the command lines of a run."""

    plan: Plan
    num_devices: int
    worker_options: tuple[tuple[str, ...], ...]  # of each dispatcher
    train_options: tuple[str, ...]


def plan_here(
    nodes: Sequence[int], workers: Sequence[WorkerConfig], train: TrainConfig, *, num_ranks: int
) -> LocalPlan:
    """Place ranks and workers on machines of so many devices; a run of `launch` has one.

    Raises `ConfigError` when there is no way.
    """
    demands = [_demand(config) for config in workers]
    ranks = Demand("trainer rank", num_ranks, share=train.gpus_per_rank, weight=OF_ENGINE)
    found = plan(nodes, ranks=ranks, workers=[each for each in demands if each.count])
    trainer, *placed = found.placed
    placed_here = iter(placed)
    options = [
        _changed(demand, next(placed_here), "--num-workers", "--gpus-per-worker")
        if demand.count
        else ()
        for demand in demands
    ]
    train_options = _changed(ranks, trainer, "--nproc-per-node", "--gpus-per-rank")
    return LocalPlan(found, sum(nodes), tuple(options), train_options)


def _changed(asked: Demand, placed: Demand, count: str, share: str) -> tuple[str, ...]:
    """Options for what the plan has made of a demand."""
    options = []
    if placed.count != asked.count:
        options.append(f"{count}={placed.count}")
    if placed.share != asked.share:
        options.append(f"{share}={placed.share}")
    return tuple(options)


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
