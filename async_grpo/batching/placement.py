"""Into which bin each item goes, and how a round is evened out by exchanges. Pure.

Items come as two lists in falling order, tokens and cost (which grows with the tokens); a bin holds
at most `max_tokens`. Arrays: _R ranks of one round, _M places of a rank, the last of them empty.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOWHERE = -1  # the bin of an item that found none
ENOUGH = 0.001  # by which the slowest rank may exceed the mean before it is worth an exchange
MAX_EXCHANGES = 300  # of one plan: a bound on the time that packing takes
NUM_PARTNERS = 32  # ranks with the least cost that an exchange is tried with first


@dataclass(frozen=True, slots=True)
class Sizes:
    """What packing knows of the items, the largest first."""

    tokens: list[int]
    costs: list[float]


def place(
    sizes: Sizes,
    num_bins: int,
    *,
    max_tokens: int,
    handicaps: Sequence[float] | None = None,
    limits: Sequence[float] | None = None,
) -> list[int]:
    """Each item to the bin with the least `handicap` + cost that has room, or NOWHERE.

    `limits` bound the cost of a bin as `max_tokens` bounds its tokens.

    >>> place(Sizes([60, 50, 40, 30], [60.0, 50.0, 40.0, 30.0]), 2, max_tokens=100)
    [0, 1, 1, 0]
    """
    room, headroom = [max_tokens] * num_bins, list(limits or [float("inf")] * num_bins)
    keys = list(handicaps or [0.0] * num_bins)
    rising = [-num_tokens for num_tokens in sizes.tokens], [-cost for cost in sizes.costs]
    usable = [(key, number) for number, key in enumerate(keys)]
    heapq.heapify(usable)
    waiting: list[tuple[int, int]] = []  # (first item that is small enough, bin)
    bins = []
    for index, (num_tokens, cost) in enumerate(zip(sizes.tokens, sizes.costs, strict=True)):
        while waiting and waiting[0][0] <= index:
            number = heapq.heappop(waiting)[1]
            heapq.heappush(usable, (keys[number], number))
        while usable:
            number = usable[0][1]
            if room[number] >= num_tokens and headroom[number] >= cost:
                break
            heapq.heappop(usable)
            fits = bisect_left(rising[0], -room[number]), bisect_left(rising[1], -headroom[number])
            heapq.heappush(waiting, (max(fits), number))
        else:
            bins.append(NOWHERE)
            continue
        room[number] -= num_tokens
        headroom[number] -= cost
        keys[number] += cost
        heapq.heapreplace(usable, (keys[number], number))
        bins.append(number)
    return bins


def place_tightly(sizes: Sizes, num_bins: int, *, max_tokens: int) -> list[int]:
    """Each item to the fullest bin that has room, once every bin has its first item.

    >>> place_tightly(Sizes([60, 50, 40, 30], [60.0, 50.0, 40.0, 30.0]), 2, max_tokens=100)
    [0, 1, 0, 1]
    """
    num_first = min(num_bins, len(sizes.tokens))
    rooms = sorted((max_tokens - sizes.tokens[index], index) for index in range(num_first))
    bins = list(range(num_first))
    for num_tokens in sizes.tokens[num_first:]:
        at = bisect_left(rooms, (num_tokens, 0))
        if at == len(rooms):
            bins.append(NOWHERE)
            continue
        room, number = rooms.pop(at)
        insort(rooms, (room - num_tokens, number))
        bins.append(number)
    return bins


def even_out(
    rounds: Sequence[Sequence[Sequence[int]]], sizes: Sizes, *, max_tokens: int
) -> list[list[list[int]]]:
    """The same rounds with faster slowest ranks; each bin is a list of indices into `sizes`.

    An item of the slowest rank is exchanged for a smaller one, or for none, of another rank of its
    round, as long as that makes the slower of the two faster.
    """
    exchanges_left = MAX_EXCHANGES
    evened = []
    for bins in rounds:
        table = _Round(bins, sizes, max_tokens)
        while exchanges_left and table.exchange():
            exchanges_left -= 1
        evened.append(table.bins())
    return evened


class _Round:
    """Bins as rows of equal length, so that an exchange is a swap of two places."""

    def __init__(self, bins: Sequence[Sequence[int]], sizes: Sizes, max_tokens: int) -> None:
        shape = len(bins), 1 + max(map(len, bins))
        self._max_tokens = max_tokens
        self._items_RM: NDArray[np.int64] = np.full(shape, NOWHERE)
        self._tokens_RM: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        self._costs_RM: NDArray[np.float64] = np.zeros(shape)
        for rank, indices in enumerate(bins):
            places = slice(len(indices))
            self._items_RM[rank, places] = indices
            self._tokens_RM[rank, places] = [sizes.tokens[index] for index in indices]
            self._costs_RM[rank, places] = [sizes.costs[index] for index in indices]
        self._tokens_R = self._tokens_RM.sum(axis=1)
        self._costs_R = self._costs_RM.sum(axis=1)
        self._enough = max(self._costs_RM.max(), self._costs_R.mean() * (1 + ENOUGH))

    def bins(self) -> list[list[int]]:
        return [[index for index in row if index != NOWHERE] for row in self._items_RM.tolist()]

    def exchange(self) -> bool:
        """Make the slowest rank faster by the best exchange; False if none does or it is enough."""
        slowest = int(self._costs_R.argmax())
        if self._costs_R[slowest] <= self._enough:
            return False
        by_cost_R = np.argsort(self._costs_R, kind="stable")
        return self._try(slowest, by_cost_R[:NUM_PARTNERS]) or (
            len(by_cost_R) > NUM_PARTNERS and self._try(slowest, by_cost_R[NUM_PARTNERS:])
        )

    def _try(self, slowest: int, partners: NDArray[np.int64]) -> bool:
        given_cost = self._costs_RM[slowest, :, None] - self._costs_RM[partners, None, :]
        given_tokens = self._tokens_RM[slowest, :, None] - self._tokens_RM[partners, None, :]
        before = self._costs_R[slowest]
        after = np.maximum(before - given_cost, self._costs_R[partners, None, None] + given_cost)
        overflows = self._tokens_R[partners, None, None] + given_tokens > self._max_tokens
        after[overflows] = np.inf  # whoever gives cost gives tokens, so `slowest` cannot overflow
        partner, mine, other = np.unravel_index(int(after.argmin()), after.shape)
        if after[partner, mine, other] >= before * (1 - 1e-9):
            return False
        self._swap((slowest, int(mine)), (int(partners[partner]), int(other)))
        return True

    def _swap(self, place: tuple[int, int], other: tuple[int, int]) -> None:
        for values_RM in (self._items_RM, self._tokens_RM, self._costs_RM):
            values_RM[place], values_RM[other] = values_RM[other], values_RM[place]
        for rank in (place[0], other[0]):
            self._tokens_R[rank] = self._tokens_RM[rank].sum()
            self._costs_R[rank] = self._costs_RM[rank].sum()
