"""Which samples each rank trains in one round: full bins, balanced by their arithmetic. Pure.

A rank's bin holds at most `max_tokens` tokens. Ranks wait for the slowest at every round, so bins
are balanced by estimated FLOPs, which grow with the square of a sample's length, not by tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from async_grpo.batching import placement
from async_grpo.batching.placement import NOWHERE, Sizes

Key = tuple[int, ...]  # (ordinal, index in group, row)
DEFAULT_ATTENTION_RATIO = 8192.0  # 12 times the hidden size of a model of a few 100M parameters

FEW_ROUNDS = 8  # beyond, filling all but one of them tightly is no better than evenly


class Item(NamedTuple):
    """A row as packing sees it."""

    key: Key
    num_tokens: int  # prompt + output
    cost: float  # relative FLOPs, see estimate_cost; grows with the tokens


class PackedRound(NamedTuple):
    """One bin of keys a rank, each in key order, and the items that wait for a later round."""

    bins: tuple[tuple[Key, ...], ...]
    leftover: tuple[Item, ...]


def attention_ratio(*, num_parameters: int, num_layers: int, attention_width: int) -> float:
    """The length in tokens at which causal attention costs as much as the matrix products.

    A forward pass costs 2 * num_parameters FLOPs a token (those it touches: with the output
    layer, without the embedding), and attention 2 * num_layers * attention_width * tokens**2
    (queries by keys and weights by values, half of the square; width = heads * head size).

    >>> attention_ratio(num_parameters=12 * 24 * 1024**2, num_layers=24, attention_width=1024)
    12288.0
    """
    return num_parameters / (num_layers * attention_width)


def estimate_cost(num_tokens: int, *, attention_ratio: float = DEFAULT_ATTENTION_RATIO) -> float:
    """Relative FLOPs of one sample, in units of one token's matrix products.

    >>> estimate_cost(1000, attention_ratio=10_000)
    1100.0
    """
    return num_tokens + num_tokens**2 / attention_ratio


def pack_round(items: Sequence[Item], *, num_ranks: int, max_tokens: int) -> PackedRound:
    """Fill one bin a rank; deterministic, whatever the order of `items`.

    If everything fits it all goes, balanced; otherwise the largest go first and the smaller ones
    fill the gaps, so that the rounds to come are few. A bin is empty only when there are fewer
    items than ranks. `ValueError` names an item that fits no bin.

    >>> items = [Item((0, i), n, n) for i, n in enumerate([70, 60, 30, 15])]
    >>> pack_round(items, num_ranks=2, max_tokens=100)
    PackedRound(bins=(((0, 0), (0, 3)), ((0, 1), (0, 2))), leftover=())
    """
    ordered, sizes = _in_order(items, num_ranks, max_tokens)
    bins = placement.place(sizes, num_ranks, max_tokens=max_tokens)
    if NOWHERE in bins and sum(sizes.tokens) <= num_ranks * max_tokens:
        tight = placement.place_tightly(sizes, num_ranks, max_tokens=max_tokens)
        if NOWHERE not in tight:  # worse balanced, but it saves a whole round
            bins = tight
    leftover = tuple(item for item, b in zip(ordered, bins, strict=True) if b == NOWHERE)
    if len(leftover) == len(ordered):
        return PackedRound(((),) * num_ranks, leftover)
    rounds = [_members(bins, num_ranks)]
    (evened,) = placement.even_out(rounds, sizes, max_tokens=max_tokens)
    return PackedRound(_keys(evened, ordered), leftover)


def pack_rounds(
    items: Sequence[Item], *, num_ranks: int, max_tokens: int
) -> list[tuple[tuple[Key, ...], ...]]:
    """Every item into few rounds that are fast: bins of keys a round, the longest round first.

    Ranks wait for each other within a round only, so the time is the sum over rounds of the most
    costly bin. Of several plans with the fewest rounds found, the fastest is evened out.
    Deterministic, whatever the order of `items`.

    >>> items = [Item((0, i), n, n) for i, n in enumerate([90, 60, 50, 30, 10])]
    >>> pack_rounds(items, num_ranks=2, max_tokens=100)
    [(((0, 0),), ((0, 1),)), (((0, 2),), ((0, 3), (0, 4)))]
    """
    ordered, sizes = _in_order(items, num_ranks, max_tokens)
    if not ordered:
        return []
    plans = [_Plan.of(bins, sizes, num_ranks) for bins in _placements(sizes, num_ranks, max_tokens)]
    best = min(plans, key=lambda plan: (len(plan.rounds), plan.time))
    rounds = placement.even_out(best.rounds, sizes, max_tokens=max_tokens)
    return [_keys(bins, ordered) for bins in rounds]


class _Plan(NamedTuple):
    rounds: list[list[list[int]]]  # the indices of each rank's items, round by round
    time: float  # sum over rounds of the most costly bin

    @classmethod
    def of(cls, bins: Sequence[int], sizes: Sizes, num_ranks: int) -> _Plan:
        """Bins of like cost meet in a round: no other grouping of the same bins is faster."""
        cost_B = np.bincount(bins, weights=sizes.costs)
        by_cost_B = np.argsort(-cost_B, kind="stable")
        members = _members(bins, len(cost_B))
        filled = [members[number] for number in by_cost_B if members[number]]
        filled += [[]] * (-len(filled) % num_ranks)
        rounds = [filled[at : at + num_ranks] for at in range(0, len(filled), num_ranks)]
        return cls(rounds, float(cost_B[by_cost_B[::num_ranks]].sum()))


def _placements(sizes: Sizes, num_ranks: int, max_tokens: int) -> Iterator[list[int]]:
    """The bin of every item by several rules, over as many bins as the rounds have ranks."""
    num_large = sum(2 * num_tokens > max_tokens for num_tokens in sizes.tokens)
    fewest = math.ceil(max(sum(sizes.tokens) / max_tokens, num_large) / num_ranks)
    total = sum(sizes.costs)
    # Fill round after round: frugal with rounds, because every round ends more than half full.
    num_bins = (2 * fewest + 1) * num_ranks
    handicaps = [2 * total * (number // num_ranks) for number in range(num_bins)]
    filling = placement.place(sizes, num_bins, max_tokens=max_tokens, handicaps=handicaps)
    yield filling
    num_rounds = 1 + max(filling) // num_ranks
    if num_rounds > fewest:
        tight = placement.place_tightly(sizes, fewest * num_ranks, max_tokens=max_tokens)
        if NOWHERE not in tight:
            yield tight
            num_rounds = fewest
    for options in _levels(sizes, num_ranks, num_rounds, max_tokens):
        bins = placement.place(sizes, num_rounds * num_ranks, max_tokens=max_tokens, **options)
        if NOWHERE not in bins:
            yield bins
    if 1 < num_rounds <= FEW_ROUNDS:
        bins = _tight_but_last(sizes, num_ranks, num_rounds, max_tokens)
        if NOWHERE not in bins:
            yield bins


def _tight_but_last(sizes: Sizes, num_ranks: int, num_rounds: int, max_tokens: int) -> list[int]:
    """Each round but the last as full as it gets, and what is left shared evenly."""
    bins, left = [NOWHERE] * len(sizes.tokens), list(range(len(sizes.tokens)))
    for number in range(num_rounds):
        fill = placement.place if number == num_rounds - 1 else placement.place_tightly
        rest = Sizes([sizes.tokens[at] for at in left], [sizes.costs[at] for at in left])
        for index, rank in zip(left, fill(rest, num_ranks, max_tokens=max_tokens), strict=True):
            if rank != NOWHERE:
                bins[index] = number * num_ranks + rank
        left = [index for index in left if bins[index] == NOWHERE]
    return bins


def _levels(
    sizes: Sizes, num_ranks: int, num_rounds: int, max_tokens: int
) -> Iterator[dict[str, list[float]]]:
    """How high the bins of each round are to be filled: all alike; or up to its longest sample.

    A sample above half of the budget shares its bin with no other such sample. So the first of
    each `num_ranks` of them sets the least height of a round, and filling its round's other bins
    up to that height costs no time.
    """
    yield {}
    num_bins, total = num_rounds * num_ranks, sum(sizes.costs)
    firsts = [
        cost
        for number, (num_tokens, cost) in enumerate(zip(sizes.tokens, sizes.costs, strict=True))
        if number % num_ranks == 0 and (number == 0 or 2 * num_tokens > max_tokens)
    ]
    tall = 0
    while tall < min(len(firsts), num_rounds - 1) and firsts[tall] * (num_rounds - tall) > (
        total / num_ranks - sum(firsts[:tall])
    ):
        tall += 1
    for num_set in sorted({min(tall, 1), tall} - {0}):
        heights = firsts[:num_set]
        level = max(0.0, total / num_ranks - sum(heights)) / (num_rounds - num_set)
        heights += [level] * (num_rounds - num_set)
        by_bin = [heights[number // num_ranks] for number in range(num_bins)]
        num_limited = num_set * num_ranks
        limits = [height * (1 + 1e-9) for height in by_bin[:num_limited]]
        limits += [math.inf] * (num_bins - num_limited)
        yield {"handicaps": [-height for height in by_bin], "limits": limits}


def _in_order(items: Sequence[Item], num_ranks: int, max_tokens: int) -> tuple[list[Item], Sizes]:
    _check(items, num_ranks, max_tokens)
    ordered = sorted(items, key=lambda item: (-item.num_tokens, item.key))
    return ordered, Sizes([item.num_tokens for item in ordered], [item.cost for item in ordered])


def _members(bins: Sequence[int], num_bins: int) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in range(num_bins)]
    for index, number in enumerate(bins):
        if number != NOWHERE:
            members[number].append(index)
    return members


def _keys(bins: Sequence[Sequence[int]], ordered: Sequence[Item]) -> tuple[tuple[Key, ...], ...]:
    return tuple(tuple(sorted(ordered[index].key for index in indices)) for indices in bins)


def _check(items: Sequence[Item], num_ranks: int, max_tokens: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    for item in items:
        if item.num_tokens > max_tokens:
            raise ValueError(
                f"a sample must fit max_tokens_per_gpu ({max_tokens}), got {item.num_tokens} "
                f"tokens in sample {item.key}: raise --max-tokens-per-gpu or shorten the sample"
            )
