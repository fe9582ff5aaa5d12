"""The split of the devices, and the staleness, with which a run makes the most samples. Pure.

Splits are tried from coarse to fine: around the one that an even flow asks for, then between the
best and its neighbours. Scoring workers are as many as keep pace with the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from async_grpo.errors import ConfigError
from async_grpo.planning.asked import Asked, Split
from async_grpo.planning.fits import fewest_ranks
from async_grpo.planning.prediction import (
    LEAST_ENGINES,
    Prediction,
    Work,
    even_flow,
    predict,
    wanted_parts,
)

BOUNDS = (0, 1, 2, 4)
COARSE = (0.5, 0.75, 1.0, 1.35, 1.8)  # of the engines of the even flow
FINE_ROUNDS = 2
ENOUGH = 0.95  # of the best samples a second: the smallest staleness, or fewest engines, of these


@dataclass(frozen=True, slots=True)
class Found:
    """The best split and staleness, and what else was tried."""

    best: Prediction
    curve: tuple[Prediction, ...]  # by staleness, with the best split
    tried: tuple[Prediction, ...]  # splits, at the best split's staleness
    as_asked: Prediction | None  # the file's own split, where the devices hold it


def search(
    work: Callable[[Split], Work], asked: Asked, *, bounds: tuple[int, ...] = BOUNDS
) -> Found:
    """`work` has the rates of a split. Raises `ConfigError` where devices are too few.

    On CPUs the file's split is the only one.
    """
    known: dict[tuple[Split, int], Prediction] = {}

    def at(split: Split, max_staleness: int) -> Prediction:
        key = split, max_staleness
        if key not in known:
            known[key] = predict(work(split), split, max_staleness=max_staleness)
        return known[key]

    own, asked_bound = asked.own_split, asked.train.max_staleness
    if asked.on_cpu:
        curve = tuple(at(own, bound) for bound in sorted({*bounds, asked_bound}))
        best = next(each for each in curve if each.max_staleness == asked_bound)
        return Found(best, curve, (best,), best)
    middle = asked_bound if asked.train.deterministic else max(1, asked_bound)
    chosen = _best_split(work, asked, lambda split: at(split, middle))
    bounds = (asked_bound,) if asked.train.deterministic else bounds
    curve = tuple(at(chosen.split, bound) for bound in sorted({*bounds, asked_bound}))
    fastest = max(each.samples_per_s for each in curve)
    best = next(each for each in curve if each.samples_per_s >= ENOUGH * fastest)
    fits = asked.devices_of(own) <= asked.fleet.num_devices and own.ranks >= fewest_ranks(asked)
    as_asked = at(own, asked_bound) if fits else None
    tried = sorted(known[key].split.engines for key in known if key[1] == middle)
    splits = tuple(
        known[key] for n in tried for key in known if key[1] == middle and key[0].engines == n
    )
    return Found(best, curve, tuple(dict.fromkeys(splits)), as_asked)


def _best_split(
    work: Callable[[Split], Work], asked: Asked, at: Callable[[Split], Prediction]
) -> Prediction:
    least = fewest_ranks(asked)
    num_scorers = len(asked.scorers)
    most = (asked.fleet.num_devices - least - num_scorers) // asked.engine_devices
    if not least or most < 1:
        needed = least + num_scorers + asked.engine_devices
        raise ConfigError(
            f"--devices {asked.fleet.num_devices} are too few for {least} trainer rank(s), "
            f"{num_scorers} scoring worker(s) and an engine of {asked.engine_devices} with a "
            f"device each: give {needed}, or see how they share one with `async-grpo launch FILE "
            "--plan-for`"
        )
    most = max(1, most if asked.engine_devices == 1 else _engines_of_nodes(asked, least))
    fewest, most = _worth_a_try(asked, most)
    flow = min(
        range(fewest, most + 1, max(1, most // 500)),
        key=lambda engines: max(_even_flow(work, asked, engines)),
    )
    a_node = max(1, asked.fleet.of_a_node // asked.engine_devices)
    wholes = [a_node * 4**power for power in range(7) if a_node * 4**power <= most]
    wanted = [*(round(flow * part) for part in COARSE), *wholes]
    numbers = {min(max(number, fewest), most) for number in wanted}
    for _ in range(FINE_ROUNDS + 1):
        found = {number: at(_split(work, asked, number)) for number in sorted(numbers)}
        top = max(each.samples_per_s for each in found.values())
        best = max(number for number in found if found[number].samples_per_s == top)
        order = sorted(numbers)
        place = order.index(best)
        near = [order[n] for n in (place - 1, place + 1) if 0 <= n < len(order)]
        numbers = numbers | {(best + other) // 2 for other in near}
    return found[best]


def _split(work: Callable[[Split], Work], asked: Asked, engines: int) -> Split:
    """So many engines; of the rest as few score as keep pace, and all others train."""
    left = asked.fleet.num_devices - engines * asked.engine_devices
    roles = len(asked.scorers)
    least = fewest_ranks(asked)
    split = Split(engines, _whole(asked, left - roles), (1,) * roles)
    for each in range(1, (left - least) // roles + 1 if roles else 0):
        split = Split(engines, _whole(asked, left - each * roles), (each,) * roles)
        generating, training, scoring = even_flow(work(split), split)
        if scoring <= max(generating, training):
            break
    return split


def _worth_a_try(asked: Asked, most: int) -> tuple[int, int]:
    """The fewest and most engines that are tried: of many, each part of the run has several."""
    several = LEAST_ENGINES * wanted_parts(asked)
    if asked.fleet.num_devices < 4 * several * asked.engine_devices:
        return 1, most
    return max(1, several), min(most, (asked.fleet.num_devices - several) // asked.engine_devices)


def _engines_of_nodes(asked: Asked, ranks: int) -> int:
    """That have all their devices in one machine, beside so few ranks."""
    left, taken = [], ranks + len(asked.scorers)
    for devices in asked.fleet.nodes:
        here = min(taken, devices)
        left.append(devices - here)
        taken -= here
    return sum(each // asked.engine_devices for each in left)


def _whole(asked: Asked, ranks: int) -> int:
    """At most so many ranks: those of several machines are as many on each, whole groups of shards.

    >>> from types import SimpleNamespace as It
    >>> [_whole(It(fleet=It(of_a_node=8), shard_ranks=lambda n: n), n) for n in (5, 8, 21)]
    [5, 8, 16]
    """
    a_node = asked.fleet.of_a_node
    whole = ranks if ranks < a_node else ranks // a_node * a_node
    group = min(asked.shard_ranks(whole), whole) or 1
    return whole // group * group


def _even_flow(work: Callable[[Split], Work], asked: Asked, engines: int) -> tuple[float, ...]:
    split = Split(
        engines,
        asked.fleet.num_devices - engines * asked.engine_devices - len(asked.scorers),
        (1,) * len(asked.scorers),
    )
    return even_flow(work(split), split)[:2]
