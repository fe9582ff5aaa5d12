"""Who of a run of one machine gets which device: `launch` asks, before it starts anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from async_grpo.config.train import TrainConfig
from async_grpo.config.worker import WorkerConfig
from async_grpo.devices.placement import Demand, Plan, plan
from async_grpo.roles import GENERATION, JUDGE

OF_ENGINE, OF_SCORER = 4, 2  # weights of shares: an engine and a trainer hold more than a forward


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What the plan adds to the command lines of a run."""

    num_devices: int
    sentence: str
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
    shares = iter(found.shares)
    train_options = []
    if found.num_ranks != num_ranks:
        train_options.append(f"--nproc-per-node={found.num_ranks}")
    if (share := next(shares)) != train.gpus_per_rank:
        train_options.append(f"--gpus-per-rank={share}")
    options = []
    for config, demand in zip(workers, demands, strict=True):
        share = next(shares) if demand.count else config.gpus_per_worker
        changed = share != config.gpus_per_worker
        options.append((f"--gpus-per-worker={share}",) if changed else ())
    return LocalPlan(sum(nodes), found.sentence, tuple(options), tuple(train_options))


def _demand(config: WorkerConfig) -> Demand:
    return Demand(
        f"{config.role} worker",
        config.num_workers if config.num_devices else 0,
        devices=config.num_devices,
        share=config.gpus_per_worker,
        weight=OF_ENGINE if config.mode in (GENERATION, JUDGE) else OF_SCORER,
    )


def describe(found: Plan) -> str:
    """A line a seat, for people."""
    lines = [found.sentence]
    for seat in found.seats:
        place = f"device {', '.join(map(str, seat.devices))}" if seat.devices else "CPUs"
        share = f", {seat.share:.0%} of it" if seat.share < 1 else ""
        lines.append(f"  {seat.who:<24} node {seat.node}  {place}{share}")
    return "\n".join(lines)
