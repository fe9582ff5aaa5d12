"""Rules that packing is compared with, and what a plan of any rule costs.

A plan is a list of bins in the order in which they are trained, `num_ranks` of them a round.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from async_grpo.batching.packing import Item, estimate_cost, pack_rounds

LONGEST = 16_384  # tokens of a sample with its prompt
Bins = list[list[int]]  # indices of the samples of each bin


@dataclass(frozen=True, slots=True)
class Case:
    """Some samples in order of arrival, and where they are to be trained."""

    lengths: Sequence[int]
    num_ranks: int
    max_tokens: int
    attention_ratio: float

    def cost(self, num_tokens: int) -> float:
        return estimate_cost(num_tokens, attention_ratio=self.attention_ratio)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a plan comes to."""

    time: float  # sum over rounds of the most costly rank, in costs of one token
    imbalance: float  # the slowest rank by the mean one
    num_rounds: int
    num_fillers: int  # ranks without a sample
    budget_share: float  # tokens of samples by all budgets of all rounds


def ours(case: Case) -> Bins:
    items = [Item((index, 0), n, case.cost(n)) for index, n in enumerate(case.lengths)]
    rounds = pack_rounds(items, num_ranks=case.num_ranks, max_tokens=case.max_tokens)
    return [[index for index, _ in keys] for bins in rounds for keys in bins]


def first_fit(case: Case) -> Bins:
    """Each sample, as it arrives, to the first bin that has room."""
    return _first_fit(case, range(len(case.lengths)))


def first_fit_decreasing(case: Case) -> Bins:
    """The same, the longest sample first."""
    return _first_fit(case, _longest_first(case))


def balanced_by_tokens(case: Case) -> Bins:
    """Tokens shared evenly among ranks, then each rank's among as many bins as all need.

    As trainers do that partition by length first, and pack on each rank alone.
    """
    shares = _evenly(case, range(len(case.lengths)), case.num_ranks)
    tokens = [sum(case.lengths[index] for index in share) for share in shares]
    num_rounds = math.ceil(max(tokens) / case.max_tokens)
    while True:
        by_rank = [_evenly(case, share, num_rounds) for share in shares]
        if all(_fits(case, members) for bins in by_rank for members in bins):
            return [bins[number] for number in range(num_rounds) for bins in by_rank]
        num_rounds += 1


def padded(case: Case) -> Bins:
    """As many samples a micro-batch as fit at full length, as they arrive."""
    size = max(1, case.max_tokens // LONGEST)
    numbers = list(range(len(case.lengths)))
    return [numbers[at : at + size] for at in range(0, len(numbers), size)]


def padded_by_length(case: Case) -> Bins:
    """Neighbours in length, as many a micro-batch as fit when padded to its longest."""
    order, bins, at = _longest_first(case), [], 0
    while at < len(order):
        size = max(1, case.max_tokens // case.lengths[order[at]])
        bins.append(order[at : at + size])
        at += size
    return bins


RULES: Mapping[str, Callable[[Case], Bins]] = {
    "ours": ours,
    "first fit": first_fit,
    "first fit decreasing": first_fit_decreasing,
    "balanced by tokens": balanced_by_tokens,
    "padded": padded,
    "padded, by length": padded_by_length,
}


def outcome(case: Case, rule: str) -> Outcome:
    """Padding is computed like any token; it fills a budget, and trains nothing."""
    bins = RULES[rule](case)
    costs = [_cost(case, members, is_padded=rule.startswith("padded")) for members in bins]
    num_rounds = math.ceil(len(bins) / case.num_ranks)
    rounds = np.zeros(num_rounds * case.num_ranks)
    rounds[: len(costs)] = costs
    budget = num_rounds * case.num_ranks * case.max_tokens
    time = float(rounds.reshape(num_rounds, -1).max(axis=1).sum())
    return Outcome(
        time=time,
        imbalance=time * case.num_ranks / sum(costs),
        num_rounds=num_rounds,
        num_fillers=int((rounds == 0).sum()),
        budget_share=sum(case.lengths) / budget,
    )


def _cost(case: Case, members: Sequence[int], *, is_padded: bool) -> float:
    lengths = [case.lengths[index] for index in members]
    if is_padded and lengths:
        return len(lengths) * case.cost(max(lengths))
    return sum(map(case.cost, lengths))


def _evenly(case: Case, members: Iterable[int], num_parts: int) -> Bins:
    """The longest first, each to the part with the fewest tokens."""
    parts: Bins = [[] for _ in range(num_parts)]
    heap = [(0, number) for number in range(num_parts)]
    for index in sorted(members, key=lambda index: -case.lengths[index]):
        num_tokens, number = heap[0]
        parts[number].append(index)
        heapq.heapreplace(heap, (num_tokens + case.lengths[index], number))
    return parts


def _fits(case: Case, members: Iterable[int]) -> bool:
    return sum(case.lengths[index] for index in members) <= case.max_tokens


def _longest_first(case: Case) -> list[int]:
    return sorted(range(len(case.lengths)), key=lambda index: -case.lengths[index])


def _first_fit(case: Case, order: Sequence[int]) -> Bins:
    room = np.full(len(case.lengths), case.max_tokens)
    bins: Bins = []
    for index in order:
        number = int((room[: len(bins) + 1] >= case.lengths[index]).argmax())
        if number == len(bins):
            bins.append([])
        bins[number].append(index)
        room[number] -= case.lengths[index]
    return bins
