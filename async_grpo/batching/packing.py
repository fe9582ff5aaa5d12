"""Which samples each rank trains in one round: full bins, balanced by estimated FLOPs. Pure.

A rank's bin holds at most `max_tokens` tokens. Ranks wait for the slowest at every round, so bins
are balanced by estimated FLOPs, which grow with the square of a sample's length, not by tokens.
The rule: samples go from the longest to the shortest, each to the least costly bin that has room.
If that needs more rounds than the tokens do, they go to the fullest bin that has room instead: this
balances worse, but may save a whole round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Key = tuple[int, ...]  # (ordinal, index in group, row)
Bins = tuple[tuple[Key, ...], ...]  # the keys of each rank
DEFAULT_ATTENTION_RATIO = 8192.0  # 12 times the hidden size of a model of a few 100M parameters


class Item(NamedTuple):
    """One row to pack."""

    key: Key
    num_tokens: int  # prompt + output
    cost: float  # relative FLOPs, see estimate_cost; grows with the tokens


class PackedRound(NamedTuple):
    """One bin of keys for each rank, sorted, and the items that wait for a later round."""

    bins: Bins
    leftover: tuple[Item, ...]


def attention_ratio(*, num_parameters: int, num_layers: int, attention_width: int) -> float:
    """The length in tokens at which causal attention costs as much as the matrix products.

    A forward pass costs 2 * num_parameters FLOPs a token (parameters with the output layer, without
    the embedding), and attention 2 * num_layers * attention_width * tokens**2 (queries by keys and
    weights by values, half of the square; width = heads * head size).

    >>> attention_ratio(num_parameters=12 * 24 * 1024**2, num_layers=24, attention_width=1024)
    12288.0
    """
    return num_parameters / max(num_layers * attention_width, 1)  # some models have no attention


def estimate_cost(num_tokens: int, *, attention_ratio: float = DEFAULT_ATTENTION_RATIO) -> float:
    """Relative FLOPs of one sample, in units of one token's matrix products.

    >>> estimate_cost(1000, attention_ratio=10_000)
    1100.0
    """
    return num_tokens + num_tokens**2 / attention_ratio


def pack_round(items: Sequence[Item], *, num_ranks: int, max_tokens: int) -> PackedRound:
    """Fill one bin for each rank; the result does not depend on the order of `items`.

    If all items fit, all are packed, balanced; otherwise the largest come first and smaller ones
    fill the gaps, so that later rounds are few. A bin is empty only if there are fewer items than
    ranks. Raises `ValueError` for an item that fits no bin.

    >>> items = [Item((0, i), n, n) for i, n in enumerate([70, 60, 30, 15])]
    >>> pack_round(items, num_ranks=2, max_tokens=100)
    PackedRound(bins=(((0, 0), (0, 3)), ((0, 1), (0, 2))), leftover=())
    """
    ordered = _longest_first(items, num_ranks, max_tokens)
    bins, leftover = _place(ordered, num_ranks, max_tokens=max_tokens)
    if leftover and sum(item.num_tokens for item in items) <= num_ranks * max_tokens:
        tight = _place(ordered, num_ranks, max_tokens=max_tokens, tightly=True)
        if not tight[1]:
            bins, leftover = tight
    return PackedRound(tuple(map(_keys, bins)), tuple(leftover))


def pack_rounds(items: Sequence[Item], *, num_ranks: int, max_tokens: int) -> list[Bins]:
    """Pack all items into few, fast rounds: the bins of keys of each, the longest round first.

    Ranks wait for each other within a round only, so the time is the sum over rounds of the most
    costly bin. Bins of similar cost share a round, which no other grouping of them beats. The
    result does not depend on the order of `items`.

    >>> items = [Item((0, i), n, n) for i, n in enumerate([90, 60, 50, 30, 10])]
    >>> pack_rounds(items, num_ranks=2, max_tokens=100)
    [(((0, 0),), ((0, 1),)), (((0, 2),), ((0, 3), (0, 4)))]
    """
    ordered = _longest_first(items, num_ranks, max_tokens)
    if not ordered:
        return []
    bins = _fewest_bins(ordered, num_ranks, max_tokens)
    bins.sort(key=lambda members: sum(item.cost for item in members), reverse=True)
    keys = [_keys(members) for members in bins]
    return [tuple(keys[at : at + num_ranks]) for at in range(0, len(keys), num_ranks)]


def _fewest_bins(ordered: list[Item], num_ranks: int, max_tokens: int) -> list[list[Item]]:
    """The bins of the fewest rounds for which the rule finds room; tokens set the least number."""
    num_large = sum(2 * item.num_tokens > max_tokens for item in ordered)
    num_tokens = sum(item.num_tokens for item in ordered)
    num_rounds = math.ceil(max(num_tokens / max_tokens, num_large) / num_ranks)
    while True:
        for tightly in (False, True):
            num_bins = num_rounds * num_ranks
            bins, leftover = _place(ordered, num_bins, max_tokens=max_tokens, tightly=tightly)
            if not leftover:
                return bins
        num_rounds += 1


def _place(
    ordered: Sequence[Item], num_bins: int, *, max_tokens: int, tightly: bool = False
) -> tuple[list[list[Item]], list[Item]]:
    """Put each item into the least costly bin that has room, or the fullest: (bins, leftover)."""
    bins: list[list[Item]] = [[] for _ in range(num_bins)]
    leftover = []
    room_B = np.full(num_bins, max_tokens)
    cost_B = np.zeros(num_bins)
    for index, item in enumerate(ordered):
        # The first items go to empty bins in both cases, so that no rank is without work.
        by_B = room_B if tightly and index >= num_bins else cost_B
        fits_B = room_B >= item.num_tokens
        number = int(np.where(fits_B, by_B, np.inf).argmin())
        if not fits_B[number]:
            leftover.append(item)
            continue
        bins[number].append(item)
        room_B[number] -= item.num_tokens
        cost_B[number] += item.cost
    return bins, leftover


def _longest_first(items: Sequence[Item], num_ranks: int, max_tokens: int) -> list[Item]:
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    for item in items:
        require_fit(item, max_tokens)
    return sorted(items, key=lambda item: (-item.num_tokens, item.key))


def require_fit(item: Item, max_tokens: int) -> None:
    """Raise `ValueError` for an item that fits no bin."""
    if item.num_tokens > max_tokens:
        raise ValueError(
            f"a sample must fit max_tokens_per_gpu ({max_tokens}), got {item.num_tokens} "
            f"tokens in sample {item.key}: raise --max-tokens-per-gpu or shorten the sample"
        )


def _keys(members: Sequence[Item]) -> tuple[Key, ...]:
    return tuple(sorted(item.key for item in members))
