"""What no packing can beat: lower bounds on the time and on the number of rounds of some samples.

The time of a plan is the sum over its rounds of the most costly bin, because ranks wait for each
other at the end of a round. A bin holds at most `max_tokens`; cost grows with the tokens. Proofs
stand with the functions; tests compare the bounds with the optimum of every small instance.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

MAX_TALLEST = 40  # rounds; a maximum over fewer bounds is a bound as well
NUM_PRICES = 16  # tried for the space of a large sample

Tokens = NDArray[np.int64]  # [N] samples, the longest first
Costs = NDArray[np.float64]  # [N] in the same order


def fewest_rounds(tokens: Tokens, *, num_ranks: int, max_tokens: int) -> int:
    """No plan has fewer rounds than this.

    Martello and Toth's L2: for any p <= max_tokens / 2, samples above max_tokens - p share their
    bin with none of at least p tokens; others above half share theirs with no other such one, and
    what they leave takes samples from p tokens to half a budget; whatever does not go in there
    needs bins of its own.

    >>> fewest_rounds(np.array([60, 60, 40, 41]), num_ranks=1, max_tokens=100)
    3
    """
    small = tokens[2 * tokens <= max_tokens]
    medium = tokens[2 * tokens > max_tokens]
    bins = math.ceil(int(tokens.sum()) / max_tokens)
    for p in np.unique(np.append(small, 0)):
        alone = int((medium > max_tokens - p).sum())
        shared = medium[medium <= max_tokens - p]
        left = len(shared) * max_tokens - int(shared.sum())
        overflow = int(small[small >= p].sum()) - left
        bins = max(bins, alone + len(shared) + max(0, math.ceil(overflow / max_tokens)))
    return math.ceil(bins / num_ranks)


def least_time(tokens: Tokens, costs: Costs, *, num_ranks: int, max_tokens: int) -> float:
    """No plan takes less time than this: the largest of three bounds.

    - All cost shared evenly: a round of time T holds at most num_ranks * T.
    - Pigeonhole: of the k * num_ranks + 1 most costly samples, k + 1 fall to one rank, and a rank's
      costs over all rounds sum to no more than the time; the k + 1 cheapest of them are a bound.
    - `tallest_rounds`, which knows the budget.

    >>> costs = np.array([4.0, 4.0, 4.0])  # two of them on one of two ranks: 8, and not 6
    >>> least_time(np.array([4, 4, 4]), costs, num_ranks=2, max_tokens=10)
    8.0
    """
    shared = float(costs.sum()) / num_ranks
    pigeonhole = [
        float(costs[number - number // num_ranks : number + 1].sum())
        for number in range(num_ranks, len(costs), num_ranks)
    ]
    tallest = tallest_rounds(tokens, costs, num_ranks=num_ranks, max_tokens=max_tokens)
    return max(shared, float(costs[0]), tallest, *pigeonhole)


def tallest_rounds(tokens: Tokens, costs: Costs, *, num_ranks: int, max_tokens: int) -> float:
    """The largest over j of: the least time of the j longest rounds, and the rest shared evenly.

    Take the longest samples until they need more than (k - 1) * num_ranks bins: each of these bins
    costs at least as much as the last sample taken, and they lie in k rounds or more. So the k-th
    longest round takes at least that sample's cost. And j rounds hold no more cost than `most_cost`
    of j * num_ranks bins: the rest takes the other rounds at least rest / num_ranks.
    """
    total, heights, best = float(costs.sum()), 0.0, 0.0
    num_large = np.cumsum(2 * tokens > max_tokens)
    num_bins = np.maximum(num_large, np.ceil(np.cumsum(tokens) / max_tokens))
    for j in range(1, MAX_TALLEST + 1):
        num_before = (j - 1) * num_ranks
        last = int(np.searchsorted(num_bins, num_before, side="right"))
        if last == len(tokens):
            break
        heights += float(costs[last])
        at_least = float(costs[: j * num_ranks].sum()) if num_large[-1] >= j * num_ranks else 0.0
        if heights + (total - at_least) / num_ranks <= best:
            continue  # not even if the bins held so little
        held = most_cost(tokens, costs, num_bins=j * num_ranks, max_tokens=max_tokens)
        best = max(best, heights + max(0.0, total - held) / num_ranks)
    return best


def most_cost(tokens: Tokens, costs: Costs, *, num_bins: int, max_tokens: int) -> float:
    """No `num_bins` bins hold samples of more cost.

    They hold at most num_bins * max_tokens tokens, and at most num_bins samples above half of a
    budget. The second limit is priced: every such sample pays, and every bin is paid back; what
    remains is a fractional knapsack. Any price gives a bound; the least of some is taken.

    >>> most_cost(np.array([60, 60, 30]), np.array([70.0, 70.0, 30.0]), num_bins=1, max_tokens=100)
    100.0
    """
    large = 2 * tokens > max_tokens
    capacity = num_bins * max_tokens
    best = _fractional_knapsack(tokens, costs, capacity)
    if large.sum() > num_bins:
        for price in np.linspace(0, float(costs[0]), NUM_PRICES)[1:]:
            priced = _fractional_knapsack(tokens, costs - price * large, capacity)
            best = min(best, float(price) * num_bins + priced)
    return best


def _fractional_knapsack(tokens: Tokens, costs: Costs, capacity: int) -> float:
    """The most cost of parts of samples with so many tokens."""
    gains = costs > 0
    tokens, costs = tokens[gains], costs[gains]
    order = np.argsort(-costs / tokens, kind="stable")
    room = capacity - np.concatenate([[0], np.cumsum(tokens[order])[:-1]])
    share = np.clip(room / tokens[order], 0.0, 1.0)
    return float((costs[order] * share).sum()) if len(order) else 0.0
