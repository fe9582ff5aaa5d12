"""How near packing comes to what no packing can beat, and what the simple rule loses.

The time of a plan is the sum over its rounds of the most costly bin, in costs of one token: ranks
wait for each other at the end of a round. It is divided by a lower bound for the same samples,
which knows the token budget, and so are the rounds. `balanced by tokens` is what trainers do that
share tokens evenly among ranks and pack on each rank alone. Nothing here but the items a second
depends on a clock: the same seeds give the same figures on every machine.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from async_grpo.batching.packing import Item, estimate_cost, pack_rounds
from benchmarks import results
from benchmarks.results import Figure, median

NAME = "packing"
GOAL = 1.03  # by the lower bound
GOAL_ITEMS = 50_000.0  # a second
GROUP = 8  # samples of a question
LONGEST = 16_384  # tokens of a sample with its prompt
RANKS = (1, 2, 8, 64, 512)
BUDGETS = (16_384, 32_768, 65_536)
SIZES = (64, 256, 1024, 4096)
ATTENTION_RATIOS = {"0.5B": 22_973.0, "7B": 70_447.0}  # Qwen2.5's, see packing.attention_ratio
MAX_TALLEST = 40  # rounds; a maximum over fewer bounds is a bound as well
NUM_PRICES = 16  # tried for the space of a large sample

Tokens = NDArray[np.int64]  # [N] samples, the longest first
Costs = NDArray[np.float64]  # [N] in the same order, growing with the tokens
Bins = list[list[int]]  # samples of each bin, as they are trained: `num_ranks` bins a round


def _either(first: Costs, second: Costs, is_first: NDArray[np.bool_]) -> Costs:
    return np.where(is_first, first, second)


# Output lengths by kind: (generator, number of samples) -> tokens.
SHAPES: Mapping[str, Callable[[np.random.Generator, int], Costs]] = {
    "reasoning": lambda rng, n: rng.lognormal(np.log(1_500), 1.0, n),
    "long reasoning": lambda rng, n: rng.lognormal(np.log(4_000), 0.8, n),
    "by question": lambda rng, n: (  # the samples of one question arrive together and are alike
        np.repeat(rng.lognormal(np.log(1_500), 0.9, n // GROUP + 1), GROUP)[:n]
        * rng.lognormal(0.0, 0.4, n)
    ),
    "bimodal": lambda rng, n: _either(  # half answer at once
        rng.normal(900, 250, n), rng.normal(9_000, 2_500, n), rng.random(n) < 0.5
    ),
    "mostly cut": lambda rng, n: _either(
        rng.lognormal(np.log(6_000), 0.6, n), np.full(n, float(LONGEST)), rng.random(n) >= 0.7
    ),
    "short": lambda rng, n: rng.lognormal(np.log(200), 0.5, n),
}


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
class Plan:
    """What a rule comes to, by what no rule can beat."""

    time: float
    slowness: float  # time by the lower bound
    num_rounds: int
    fewest_rounds: int


@click.command()
@click.option("--quick", is_flag=True, help="up to 256 samples")
@click.option("--results-dir", default=str(results.FOLDER), help="where packing.json goes")
def main(quick: bool, results_dir: str) -> None:
    """Compare packing with the simple rule and with a lower bound."""
    click.echo(f"{results.machine()}, {results.load()}; times are estimated FLOPs")
    sizes = tuple(size for size in SIZES if size <= 256) if quick else SIZES
    figures: list[Figure] = []
    everything: list[Plan] = []
    for shape, num_ranks in itertools.product(SHAPES, RANKS):
        limits = itertools.product(BUDGETS, sizes, ATTENTION_RATIOS.values())
        cases = [Case(lengths_of(shape, n), num_ranks, budget, r) for budget, n, r in limits]
        own, simple = ([plan(case, rule) for case in cases] for rule in RULES)
        everything += own
        figures += _figures(f"{shape}, {num_ranks} ranks", own, simple)
    met = [found.slowness <= GOAL for found in everything]
    fewest = [found.num_rounds == found.fewest_rounds for found in everything]
    slowness = [found.slowness for found in everything]
    figures += [
        Figure("sets within 3 % of the least time", float(np.mean(met)), "fraction", "higher", 1.0),
        Figure("sets in the fewest rounds", float(np.mean(fewest)), "fraction", "higher"),
        median("all sets, time / lower bound", slowness, "x", goal=GOAL),
        speed(num_items=max(sizes), num_ranks=64, repeats=3 if quick else 9),
    ]
    click.echo(results.show(figures))
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}")


def _figures(title: str, own: Sequence[Plan], simple: Sequence[Plan]) -> list[Figure]:
    losses = [other.time / ours.time for other, ours in zip(simple, own, strict=True)]
    excess = [found.num_rounds / found.fewest_rounds for found in own]
    return [
        median(f"{title}, time / lower bound", [p.slowness for p in own], "x", goal=GOAL),
        median(f"{title}, rounds / lower bound", excess, "x", goal=GOAL),
        median(f"{title}, balanced by tokens / ours, time", losses, "x", better="higher"),
    ]


def lengths_of(shape: str, count: int, *, seed: int = 0) -> list[int]:
    """Tokens with the prompt, from 16 to LONGEST."""
    rng = np.random.default_rng([seed, count])
    drawn = np.clip(SHAPES[shape](rng, count), 16, LONGEST)
    return [int(length) for length in drawn]


def ours(case: Case) -> Bins:
    items = [Item((index, 0), n, case.cost(n)) for index, n in enumerate(case.lengths)]
    rounds = pack_rounds(items, num_ranks=case.num_ranks, max_tokens=case.max_tokens)
    return [[index for index, _ in keys] for bins in rounds for keys in bins]


def balanced_by_tokens(case: Case) -> Bins:
    """Tokens shared evenly among ranks, then each rank's among as many bins as all need."""
    shares = _evenly(case, range(len(case.lengths)), case.num_ranks)
    tokens = [sum(case.lengths[index] for index in share) for share in shares]
    num_rounds = math.ceil(max(tokens) / case.max_tokens)
    while True:
        by_rank = [_evenly(case, share, num_rounds) for share in shares]
        sizes = [sum(case.lengths[i] for i in members) for bins in by_rank for members in bins]
        if max(sizes) <= case.max_tokens:
            return [bins[number] for number in range(num_rounds) for bins in by_rank]
        num_rounds += 1


RULES: Mapping[str, Callable[[Case], Bins]] = {
    "ours": ours,
    "balanced by tokens": balanced_by_tokens,
}


def plan(case: Case, rule: str = "ours") -> Plan:
    """One rule on one case."""
    bins = RULES[rule](case)
    num_rounds = math.ceil(len(bins) / case.num_ranks)
    rounds = np.zeros(num_rounds * case.num_ranks)
    rounds[: len(bins)] = [sum(case.cost(case.lengths[i]) for i in members) for members in bins]
    time = float(rounds.reshape(num_rounds, -1).max(axis=1).sum())
    tokens = np.sort(np.array(case.lengths))[::-1]
    costs = tokens + tokens**2 / case.attention_ratio
    limits = {"num_ranks": case.num_ranks, "max_tokens": case.max_tokens}
    return Plan(
        time=time,
        slowness=time / least_time(tokens, costs, **limits),
        num_rounds=num_rounds,
        fewest_rounds=fewest_rounds(tokens, **limits),
    )


def _evenly(case: Case, members: Iterable[int], num_parts: int) -> Bins:
    """The longest first, each to the part with the fewest tokens."""
    parts: Bins = [[] for _ in range(num_parts)]
    heap = [(0, number) for number in range(num_parts)]
    for index in sorted(members, key=lambda index: -case.lengths[index]):
        num_tokens, number = heap[0]
        parts[number].append(index)
        heapq.heapreplace(heap, (num_tokens + case.lengths[index], number))
    return parts


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


def speed(*, num_items: int, num_ranks: int, repeats: int) -> Figure:
    """Items packed in a second of the processor."""
    ratio = ATTENTION_RATIOS["0.5B"]
    items = [
        Item((index, 0), length, estimate_cost(length, attention_ratio=ratio))
        for index, length in enumerate(lengths_of("reasoning", num_items))
    ]
    rates = []
    for _ in range(repeats):
        begin = time.process_time()
        pack_rounds(items, num_ranks=num_ranks, max_tokens=BUDGETS[0])
        rates.append(num_items / (time.process_time() - begin))
    name = f"{num_items} samples to {num_ranks} ranks, packed"
    return median(name, rates, "items/s", better="higher", goal=GOAL_ITEMS)


if __name__ == "__main__":
    main()
