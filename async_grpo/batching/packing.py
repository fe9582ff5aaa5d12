"""Which samples each rank trains in one round: full bins, balanced by their arithmetic. Pure.

A rank's bin holds at most `max_tokens` tokens. Ranks wait for the slowest at every round, so bins
are balanced by estimated FLOPs, which grow with the square of a sample's length, not by tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Key = tuple[int, int]  # (ordinal, index in group)
DEFAULT_ATTENTION_RATIO = 8192.0  # 12 times the hidden size of a model of a few 100M parameters


class Item(NamedTuple):
    """A sample as packing sees it."""

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
    _check(items, num_ranks, max_tokens)
    ordered = sorted(items, key=lambda item: (-item.num_tokens, item.key))
    num_left, ranks = _place(ordered, num_ranks, max_tokens, best_fit=False)
    if num_left and sum(item.num_tokens for item in items) <= num_ranks * max_tokens:
        num_left_tight, tight = _place(ordered, num_ranks, max_tokens, best_fit=True)
        if num_left_tight == 0:  # worse balanced, but it saves a whole round
            ranks = tight
    bins: list[list[Key]] = [[] for _ in range(num_ranks)]
    leftover = []
    for item, rank in zip(ordered, ranks, strict=True):
        if rank < 0:
            leftover.append(item)
        else:
            bins[rank].append(item.key)
    return PackedRound(tuple(tuple(sorted(keys)) for keys in bins), tuple(leftover))


def pack_rounds(
    items: Sequence[Item], *, num_ranks: int, max_tokens: int
) -> list[tuple[tuple[Key, ...], ...]]:
    """Every item into as few balanced rounds as `pack_round` finds; bins of keys a round."""
    rounds = []
    waiting: Sequence[Item] = items
    while waiting:
        bins, waiting = pack_round(waiting, num_ranks=num_ranks, max_tokens=max_tokens)
        rounds.append(bins)
    return rounds


def _place(
    ordered: Sequence[Item], num_ranks: int, max_tokens: int, *, best_fit: bool
) -> tuple[int, list[int]]:
    """(number of items that found no bin, rank of each item or -1), taking items in order.

    An item goes to the rank with the least cost that has room, or with `best_fit` to the fullest
    that has room, once every rank has its first item.
    """
    room_R = np.full(num_ranks, max_tokens, dtype=np.int64)
    cost_R = np.zeros(num_ranks)
    most_room = max_tokens
    ranks = []
    for position, item in enumerate(ordered):
        if item.num_tokens > most_room:
            ranks.append(-1)
            continue
        preference_R = room_R if best_fit and position >= num_ranks else cost_R
        fits_R = room_R >= item.num_tokens
        rank = int(np.where(fits_R, preference_R, np.inf).argmin())
        room_R[rank] -= item.num_tokens
        cost_R[rank] += item.cost
        most_room = int(room_R.max())
        ranks.append(rank)
    return ranks.count(-1), ranks


def _check(items: Sequence[Item], num_ranks: int, max_tokens: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    for item in items:
        if item.num_tokens > max_tokens:
            raise ValueError(
                f"a sample must fit max_tokens_per_gpu ({max_tokens}), got {item.num_tokens} "
                f"tokens in sample {item.key}: raise --max-tokens-per-gpu or shorten the sample"
            )
