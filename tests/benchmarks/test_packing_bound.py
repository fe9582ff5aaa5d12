"""What packing is measured by are bounds, against the optimum of every small instance."""

import itertools

import numpy as np
import pytest
from effort import histories
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.batching.packing import Item, pack_rounds
from benchmarks.packing import RULES, Case, fewest_rounds, least_time, most_cost, plan

BUDGET = 12
small = st.lists(st.integers(1, BUDGET), min_size=1, max_size=6)
ratios = st.sampled_from([2.0, 12.0, 100.0])


def sizes_of(lengths, attention_ratio):
    tokens = np.sort(np.array(lengths))[::-1]
    return tokens, tokens + tokens**2 / attention_ratio


def partitions(indices):
    """Every way to put them into unordered bins."""
    if not indices:
        yield []
        return
    first, rest = indices[0], indices[1:]
    for bins in partitions(rest):
        for at in range(len(bins)):
            yield [*bins[:at], [first, *bins[at]], *bins[at + 1 :]]
        yield [[first], *bins]


def optimum(tokens, costs, num_ranks):
    """(fewest rounds, least time) of all plans: like bins in one round are the best grouping."""
    rounds, times = [], []
    for bins in partitions(list(range(len(tokens)))):
        if any(tokens[members].sum() > BUDGET for members in bins):
            continue
        heights = sorted((costs[members].sum() for members in bins), reverse=True)
        rounds.append(-(-len(bins) // num_ranks))
        times.append(sum(heights[::num_ranks]))
    return min(rounds), min(times)


@settings(max_examples=histories(60), deadline=None)
@given(small, st.integers(1, 3), ratios)
def test_no_plan_of_a_small_instance_beats_the_bounds(lengths, num_ranks, attention_ratio):
    tokens, costs = sizes_of(lengths, attention_ratio)
    limits = {"num_ranks": num_ranks, "max_tokens": BUDGET}
    best_rounds, best_time = optimum(tokens, costs, num_ranks)
    assert fewest_rounds(tokens, **limits) <= best_rounds
    assert least_time(tokens, costs, **limits) <= best_time * (1 + 1e-9)


@settings(max_examples=histories(30), deadline=None)
@given(small, st.integers(1, 3), ratios)
def test_no_choice_of_samples_for_some_bins_costs_more_than_the_bound(
    lengths, num_bins, attention_ratio
):
    tokens, costs = sizes_of(lengths, attention_ratio)
    most = most_cost(tokens, costs, num_bins=num_bins, max_tokens=BUDGET)
    for bins in itertools.product(range(num_bins + 1), repeat=len(tokens)):
        numbers = np.array(bins)  # the last bin is outside
        loads = np.bincount(numbers, weights=tokens, minlength=num_bins + 1)[:num_bins]
        if loads.max(initial=0) <= BUDGET:
            assert costs[numbers < num_bins].sum() <= most * (1 + 1e-9)


@settings(max_examples=histories(60), deadline=None)
@given(small, st.integers(1, 3), ratios)
def test_small_instances_are_packed_near_their_optimum(lengths, num_ranks, attention_ratio):
    tokens, costs = sizes_of(lengths, attention_ratio)
    items = [
        Item((i, 0), int(n), float(c)) for i, (n, c) in enumerate(zip(tokens, costs, strict=True))
    ]
    rounds = pack_rounds(items, num_ranks=num_ranks, max_tokens=BUDGET)
    time = sum(max(sum(costs[o] for o, _ in keys) for keys in bins) for bins in rounds)
    best_rounds, best_time = optimum(tokens, costs, num_ranks)
    assert len(rounds) <= best_rounds + 1
    assert time <= 1.34 * best_time  # Graham's 4/3 of the longest first


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "time", "rounds"),
    [
        ([12, 12, 12], 2, 24, 2),  # one to a bin: two rounds of 12
        ([12, 7, 7, 2], 2, 19, 2),  # the second round is as long as the third sample
        ([7, 7, 7, 5, 5, 5], 3, 12, 1),  # all full
        ([6, 6, 6], 2, 12, 1),  # two halves share a bin
    ],
)
def test_bounds_of_known_instances(lengths, num_ranks, time, rounds):
    tokens, costs = sizes_of(lengths, 1e12)
    limits = {"num_ranks": num_ranks, "max_tokens": BUDGET}
    assert least_time(tokens, costs, **limits) == pytest.approx(time)
    assert fewest_rounds(tokens, **limits) == rounds


def test_the_budget_raises_the_bound_above_an_even_share():
    tokens, costs = sizes_of([12, 8, 8, 8], 3.0)  # one to a bin: two rounds, of 12 and of 8
    bound = least_time(tokens, costs, num_ranks=2, max_tokens=BUDGET)
    assert bound == pytest.approx(costs[0] + costs[1], rel=0.01)
    assert bound > 1.2 * costs.sum() / 2


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_packs_every_sample_within_the_budget(rule):
    lengths = [300, 900, 50, 70, 990, 500, 500, 20, 410, 640]
    case = Case(lengths, num_ranks=2, max_tokens=1000, attention_ratio=500.0)
    bins = RULES[rule](case)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert max(sum(lengths[index] for index in members) for members in bins) <= 1000
    assert plan(case, rule).num_rounds == -(-len(bins) // 2)


def test_a_plan_takes_the_time_of_its_slowest_ranks():
    case = Case([300, 100, 100], num_ranks=2, max_tokens=300, attention_ratio=300.0)
    found = plan(case, "balanced by tokens")
    assert found.time == 300 + 300 and found.num_rounds == 1
