"""Assigns the devices of machines to the ranks and workers of a run. Pure.

Demands are tried from the best to the least: a device for each process; fewer ranks and workers, on
whose number the run's result does not depend; workers that share devices by fractions; one device
that all share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from async_grpo.util.errors import ConfigError

SHARED_IN_ALL = 0.9  # of a device that several share: each process also has a CUDA context
LEAST_SHARE = 0.1
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Demand:
    """Equal workers of one dispatcher, or the trainer's ranks."""

    who: str  # such as "generation worker"
    count: int
    devices: int = 1  # of each process: its tensor parallel size
    share: float = 1.0  # of each device that a process must have; below 1 others may have the rest
    weight: int = 2  # of a process's share, where the plan decides it


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one rank or worker; on its node's CPUs when it has no device."""

    who: str
    node: int
    devices: tuple[int, ...]
    share: float  # of each of these devices, compute and memory


@dataclass(frozen=True, slots=True)
class Placement:
    """The seats of all ranks and workers, and the demands that they meet."""

    seats: tuple[Seat, ...]
    placed: tuple[Demand, ...]  # the ranks, then the workers, with the counts and shares they got
    sentence: str  # that describes the placement


def plan(nodes: Sequence[int], *, ranks: Demand, workers: Sequence[Demand]) -> Placement:
    """Place the ranks and all workers on `nodes`, given as the number of devices of each.

    The shares of a device never exceed 1. Without any device all processes work on CPUs. Raises
    `ConfigError` when no demand fits.
    """
    demands = (ranks, *workers)
    if not sum(nodes):
        seats = [Seat(f"{each.who} {i}", 0, (), 1.0) for each in demands for i in range(each.count)]
        words = "no NVIDIA device: everything runs on the CPUs"
        return Placement(tuple(seats), demands, words)
    for wanted in _from_best_to_least(nodes, ranks, workers):
        seats_found = _place(nodes, wanted)
        if seats_found is not None:
            return Placement(tuple(seats_found), wanted, _in_words(nodes, wanted, asked=demands))
    raise _refusal(nodes, ranks, workers)


def plan_in_turns(
    nodes: Sequence[int], *, ranks: Demand, workers: Sequence[Demand], engines: str
) -> Placement:
    """As `plan`, where ranks have the devices of the workers named `engines`, in turns with them.

    Raises `ConfigError` for several machines, and for engines that have fewer devices than ranks.
    """
    if not sum(nodes):
        return plan(nodes, ranks=ranks, workers=workers)
    given = sum(each.count * each.devices for each in workers if each.who == engines)
    if sum(map(bool, nodes)) > 1 or given < min(max(1, ranks.count), sum(nodes)):
        raise ConfigError(
            f"--colocated needs one machine, and a device of a {engines} for each of {ranks.count} "
            f"ranks, got {given} on {_words_of(nodes)}: set num_workers and --nproc-per-node, or "
            "leave it out"
        )
    found = plan(nodes, ranks=replace(ranks, count=0), workers=workers)
    theirs = [seat for seat in found.seats if seat.who.startswith(engines)]
    devices = sorted((seat.node, device) for seat in theirs for device in seat.devices)
    ranks = replace(ranks, count=min(ranks.count, len(devices)), share=theirs[0].share)
    seats = [
        Seat(f"{ranks.who} {i}", node, (device,), ranks.share)
        for i, (node, device) in enumerate(devices[: ranks.count])
    ]
    words = f"{found.sentence}, and {ranks.count} {ranks.who}(s) in turns with the {engines}s"
    return Placement((*seats, *found.seats), (ranks, *found.placed[1:]), words)


def _from_best_to_least(
    nodes: Sequence[int], ranks: Demand, workers: Sequence[Demand]
) -> Iterator[tuple[Demand, ...]]:
    wanted = [ranks, *workers]
    yield tuple(wanted)
    while most := max(wanted, key=lambda each: (each.count > 1) * each.count * each.devices):
        if most.count <= 1:
            break
        wanted[wanted.index(most)] = replace(most, count=most.count - 1)
        yield tuple(wanted)
    one, workers = wanted[0], wanted[1:]
    sharers = [each for each in workers if each.devices == 1 and each.share == 1]
    num_sharers = sum(each.count for each in sharers)
    whole = sum(each.count * each.devices for each in workers if each not in sharers)
    for num_shared in range(min(sum(nodes) - 1 - whole, num_sharers - 1), 1, -1):
        # Equal shares fit in whatever order Ray places the workers.
        share = round(SHARED_IN_ALL / -(-num_sharers // num_shared), 2)
        yield (one, *(replace(each, share=share) if each in sharers else each for each in workers))
    yield (one, *_by_weight(workers, sharers))
    if sum(nodes) == 1:
        with_rank = [*sharers, one] if one.share == 1 else sharers
        yield tuple(_by_weight((one, *workers), with_rank))


def _by_weight(demands: Sequence[Demand], sharers: Sequence[Demand]) -> list[Demand]:
    """The demands with one device divided among the sharers by their weights."""
    fixed = sum(d.count * d.share for d in demands if d not in sharers and d.share < 1)
    weights = sum(each.count * each.weight for each in sharers) or 1
    room = SHARED_IN_ALL - fixed
    return [
        replace(each, share=int(100 * room * each.weight / weights) / 100)
        if each in sharers
        else each
        for each in demands
    ]


def _place(nodes: Sequence[int], demands: Sequence[Demand]) -> list[Seat] | None:
    """Seats in the order of the demands, None when they do not fit.

    Whole devices are placed first, processes with most devices before others; ranks from the first
    device on, workers from the last back. A share takes the device with the least room for it.
    """
    if any(not LEAST_SHARE <= each.share <= 1 for each in demands if each.count):
        return None
    left = {(node, device): 1.0 for node, count in enumerate(nodes) for device in range(count)}
    seats: dict[tuple[int, int], Seat] = {}
    order = sorted(range(len(demands)), key=lambda i: (demands[i].share < 1, -demands[i].devices))
    for number in order:
        demand = demands[number]
        for i in range(demand.count):
            found = _room(left, demand, len(nodes), is_rank=number == 0)
            if found is None:
                return None
            for place in found:
                left[place] -= demand.share
            devices = tuple(device for _, device in found)
            seats[number, i] = Seat(f"{demand.who} {i}", found[0][0], devices, demand.share)
    return [seats[key] for key in sorted(seats)]


def _room(
    left: dict[tuple[int, int], float], demand: Demand, num_nodes: int, *, is_rank: bool
) -> list[tuple[int, int]] | None:
    """(node, device) of each device for one process, all of one node; None: no node has room."""
    nodes = range(num_nodes) if is_rank else range(num_nodes - 1, -1, -1)
    for node in nodes:
        enough = [at for at in left if at[0] == node and left[at] >= demand.share - ROUNDING]
        if demand.share < 1:
            enough.sort(key=lambda at: left[at])
        elif not is_rank:
            enough = enough[::-1]
        if len(enough) >= demand.devices:
            return sorted(enough[: demand.devices])
    return None


def _in_words(nodes: Sequence[int], demands: Sequence[Demand], *, asked: Sequence[Demand]) -> str:
    parts = []
    for each in demands:
        if not each.count:
            continue
        name = each.who + ("s" if each.count > 1 else "")
        if each.share < 1:
            parts.append(f"{each.count} {name} with {each.share:.0%} of a device and its memory")
        else:
            noun = "a device" if each.devices == 1 else f"{each.devices} devices"
            parts.append(f"{each.count} {name} with {noun}{' each' if each.count > 1 else ''}")
    pairs = zip(demands, asked, strict=True)
    fewer = [f"{old.count} {old.who}s" for new, old in pairs if new.count < old.count]
    missing = f" ({' and '.join(fewer)} were asked for)" if fewer else ""
    return f"{_words_of(nodes)}: {', '.join(parts)}{missing}"


def _words_of(nodes: Sequence[int]) -> str:
    devices = " + ".join(map(str, nodes))
    return f"{devices} NVIDIA device{'s' if sum(nodes) > 1 else ''}"


def _refusal(nodes: Sequence[int], ranks: Demand, workers: Sequence[Demand]) -> ConfigError:
    needs = [f"{each.count} {each.who}(s) of {each.devices}" for each in workers if each.count]
    return ConfigError(
        f"{_words_of(nodes)} cannot hold {' and '.join((f'a {ranks.who}', *needs))}: lower "
        "--num-workers, --tensor-parallel-size or --scorer-ranks, or share devices with "
        "--gpus-per-worker"
    )
