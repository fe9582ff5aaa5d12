"""Finds the split of the devices, and the staleness, with which a run trains most samples a second.

Splits are tried from coarse to fine: around the one that is best for an even flow, then between the
best and its neighbours. There are as many scoring workers as keep pace with the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from async_grpo.devices.core_shares import threads_each
from async_grpo.planning.asked import Asked, Split, fleet_of
from async_grpo.planning.bills import fewest_ranks, hosts_hold, rank_fits, remedies
from async_grpo.planning.prediction import (
    LEAST_ENGINES,
    Prediction,
    Work,
    even_flow,
    predict,
    wanted_parts,
)
from async_grpo.util.errors import ConfigError

BOUNDS = (0, 1, 2, 4)
COARSE = (0.6, 1.0, 1.6)  # times the engines of the even flow
FINE_ROUNDS = 2
MORE_DEVICES = 64  # how far beyond twice the devices the fewest that are enough are searched
ENOUGH = 0.95  # of the most samples a second: the smallest staleness that has them is best


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best split and staleness, and the other predictions."""

    best: Prediction
    curve: tuple[Prediction, ...]  # by staleness, with the best split
    tried: tuple[Prediction, ...]  # splits, at the best split's staleness
    as_asked: Prediction | None  # the file's own split, where the devices hold it


def search(
    work: Callable[[Split], Work],
    asked: Asked,
    *,
    bounds: tuple[int, ...] = BOUNDS,
    predict: Callable[..., Prediction] = predict,
) -> SearchResult:
    """The best split and staleness; `work` gives the work of a split.

    On CPUs only the number of ranks is searched, and the file's is kept where it is fast enough;
    where processes share devices, the file's split is the only one that is tried. Raises
    `ConfigError` where devices are too few.
    """
    known: dict[tuple[Split, int], Prediction] = {}

    def at(split: Split, max_staleness: int) -> Prediction:
        key = split, max_staleness
        if key not in known:
            known[key] = predict(work(split), split, max_staleness=max_staleness)
        return known[key]

    own, asked_bound = asked.own_split, asked.train.sampling.max_staleness
    if asked.train.memory.colocated:
        bounds = tuple(bound for bound in bounds if bound <= 1)
    if asked.on_cpu or asked.is_shared:
        splits = (own, *_with_other_ranks(asked)) if asked.on_cpu else (own,)
        tried = [at(split, asked_bound) for split in splits]
        best = _fast_enough(tried)
        curve = tuple(at(best.split, bound) for bound in sorted({*bounds, asked_bound}))
        return SearchResult(best, curve, tuple(tried), tried[0])
    middle = asked_bound if asked.train.batching.deterministic else max(1, asked_bound)
    chosen = _best_split(work, asked, lambda split: at(split, middle))
    bounds = (asked_bound,) if asked.train.batching.deterministic else bounds
    curve = tuple(at(chosen.split, bound) for bound in sorted({*bounds, asked_bound}))
    best = _fast_enough(curve)
    as_asked = at(own, asked_bound) if _is_held(asked, own) else None
    tried = [known[key] for key in known if key[1] == middle]
    tried.sort(key=lambda each: each.split.engines)
    return SearchResult(best, curve, tuple(tried), as_asked)


def _fast_enough(found: Sequence[Prediction]) -> Prediction:
    """The first that trains nearly as many samples a second as the fastest."""
    fastest = max(each.samples_per_s for each in found)
    return next(each for each in found if each.samples_per_s >= ENOUGH * fastest)


def _with_other_ranks(asked: Asked) -> Iterator[Split]:
    """The file's split with up to as many ranks as cores, where that changes no process's threads.

    Speeds are measured with these threads.
    """
    own, cores = asked.own_split, asked.fleet.num_cores
    others = own.engines + sum(own.scorers)
    threads = threads_each(others + own.ranks, cores=cores)
    for ranks in range(1, cores + 1):
        split = replace(own, ranks=ranks)
        is_whole = ranks % asked.shard_ranks(ranks) == 0
        alike = is_whole and threads_each(others + ranks, cores=cores) == threads
        if ranks != own.ranks and alike and hosts_hold(asked, split):
            yield split


def _best_split(
    work: Callable[[Split], Work], asked: Asked, at: Callable[[Split], Prediction]
) -> Prediction:
    most = most_engines(asked)
    if not most:
        raise _too_few(asked)
    fewest, most = _worth_a_try(asked, most)
    flow = min(
        range(fewest, most + 1, max(1, most // 500)),
        key=lambda engines: max(_even_flow(work, asked, engines)),
    )
    a_node = max(1, asked.fleet.of_a_node // asked.engine_devices)
    wholes = [a_node * 4**power for power in range(7) if a_node * 4**power <= most]
    wanted = [*(round(flow * part) for part in COARSE), *wholes]
    numbers = {min(max(number, fewest), most) for number in wanted}
    found, top = dict[int, Prediction](), 0.0
    for _ in range(FINE_ROUNDS + 1):
        for number in sorted(numbers - found.keys(), key=lambda number: abs(number - flow)):
            split = _split(work, asked, number)
            _, training_s, _ = even_flow(work(split), split)
            if asked.num_samples / training_s > top:  # else the ranks alone are too slow
                found[number] = at(split)
                top = max(top, found[number].samples_per_s)
        best = max(number for number in found if found[number].samples_per_s == top)
        near = (pair for pair in pairwise(sorted(found)) if best in pair)
        numbers = numbers | {(low + high) // 2 for low, high in near}
    return found[best]


def _too_few(asked: Asked) -> ConfigError:
    """The error for too few devices: how many are enough, and options that need fewer.

    A run needs at least one engine, and one worker of each role that scores.
    """
    fleet = asked.fleet
    more = range(fleet.num_devices + 1, 2 * fleet.num_devices + MORE_DEVICES)
    fleets = ((n, replace(fleet_of(str(n)), kind=fleet.kind)) for n in more)
    larger = ((n, replace(asked, fleet=each)) for n, each in fleets)
    enough = next((n for n, run in larger if most_engines(run)), 0)
    found = [f"give {enough}"] if enough else []
    found += remedies(asked, lambda changed: most_engines(changed) > 0)
    roles = f"{fewest_ranks(asked)} trainer rank(s), {len(asked.scorers)} scoring worker(s)"
    return ConfigError(
        f"--devices {fleet.num_devices} are too few for {roles} and an engine of "
        f"{asked.engine_devices} with a device each, ranks as many on each of their machines: "
        f"{', or '.join(found) or 'train a smaller model'}"
    )


def most_engines(asked: Asked) -> int:
    """The most engines beside the fewest ranks that fit and one worker of each role that scores.

    0: devices are too few.
    """
    least = fewest_ranks(asked, most=asked.fleet.num_devices)
    if not least:
        return 0
    # Fewer engines leave at least as much room, so a bisection finds the most.
    numbers = range(1, asked.fleet.num_devices // asked.engine_devices + 1)
    roles = (1,) * len(asked.scorers)
    return bisect_left(numbers, True, key=lambda n: not _ranks_beside(asked, n, roles, least))


def _split(work: Callable[[Split], Work], asked: Asked, engines: int) -> Split:
    """The split with so many engines: as few devices score as keep pace, all others train."""
    roles, least = len(asked.scorers), fewest_ranks(asked)

    def split(each: int) -> Split:
        scorers = (each,) * roles
        return Split(engines, _ranks_beside(asked, engines, scorers, least), scorers)

    def is_enough(each: int) -> bool:
        generating, training, scoring = even_flow(work(split(each)), split(each))
        return scoring <= max(generating, training)

    if not roles:
        return split(1)
    left = asked.fleet.num_devices - engines * asked.engine_devices - least
    left //= asked.scoring_devices((1,) * roles)
    most = bisect_left(range(1, left + 1), True, key=lambda each: not split(each).ranks)
    return split(min(most, 1 + bisect_left(range(1, most + 1), True, key=is_enough)))


def _worth_a_try(asked: Asked, most: int) -> tuple[int, int]:
    """The fewest and most engines to try: in a large run each simulated part must have several."""
    several = LEAST_ENGINES * wanted_parts(asked)
    if asked.fleet.num_devices < 4 * several * asked.engine_devices:
        return 1, most
    most = min(most, (asked.fleet.num_devices - several) // asked.engine_devices)
    return min(max(1, several), most), most


def _ranks_beside(asked: Asked, engines: int, scorers: tuple[int, ...], least: int) -> int:
    """The most ranks that fit beside engines and scorers; 0: fewer than `least` do."""
    taken = engines * asked.engine_devices + asked.scoring_devices(scorers)
    most = asked.fleet.num_devices - taken
    tried = (Split(engines, ranks, scorers) for ranks in range(most, least - 1, -1))
    return next((split.ranks for split in tried if _is_held(asked, split)), 0)


def _is_held(asked: Asked, split: Split) -> bool:
    """Whether the devices hold the whole split."""
    others = asked.scoring_devices(split.scorers) + asked.other_devices
    beside = _engines_beside(asked, split.ranks, others)
    return beside >= split.engines and rank_fits(asked, split.ranks)


def _engines_beside(asked: Asked, ranks: int, others: int) -> int:
    """How many engines fit, each within one machine, beside `ranks` and `others` of a device each.

    Machines with ranks have equally many, the largest machines first. `others` first take devices
    that no engine can use. -1: ranks do not divide so, or not into whole groups of shards.

    >>> from types import SimpleNamespace as It
    >>> def run(n, *nodes): return It(engine_devices=2, shard_ranks=lambda ranks: n,
    ...     fleet=It(nodes=nodes, of_a_node=8))
    >>> [_engines_beside(run(1, 8, 8), ranks, 0) for ranks in (8, 9, 10, 12, 14)]
    [4, -1, 2, 2, 0]
    >>> _engines_beside(run(1, 8, 8), 10, 2), _engines_beside(run(4, 8, 8), 10, 0)
    (2, -1)
    """
    nodes, size = sorted(asked.fleet.nodes, reverse=True), asked.engine_devices
    machines = -(-ranks // asked.fleet.of_a_node)
    each = ranks // machines
    if ranks % machines or ranks % asked.shard_ranks(ranks) or each > nodes[machines - 1]:
        return -1
    left = [node - each * (number < machines) for number, node in enumerate(nodes)]
    spare = sum(node % size for node in left)
    return sum(node // size for node in left) - -(-max(0, others - spare) // size)


def _even_flow(work: Callable[[Split], Work], asked: Asked, engines: int) -> tuple[float, ...]:
    split = Split(
        engines,
        asked.fleet.num_devices
        - engines * asked.engine_devices
        - asked.scoring_devices((1,) * len(asked.scorers)),
        (1,) * len(asked.scorers),
    )
    return even_flow(work(split), split)[:2]
