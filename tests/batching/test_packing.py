import math
import random
import time

import pytest
from effort import histories
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.batching.packing import (
    Item,
    attention_ratio,
    estimate_cost,
    pack_round,
    pack_rounds,
)

BUDGET = 1000
lengths = st.lists(st.integers(1, BUDGET), max_size=60)


def items_of(lengths):
    return [
        Item((i // 4, i % 4), n, estimate_cost(n, attention_ratio=500))
        for i, n in enumerate(lengths)
    ]


def heavy_tailed(count, *, longest, seed=0):
    rng = random.Random(seed)
    return [min(longest, int(60 * rng.paretovariate(1.1))) for _ in range(count)]


def costs_of(bins, items):
    cost = {item.key: item.cost for item in items}
    return [sum(cost[key] for key in keys) for keys in bins]


@settings(max_examples=histories(100), deadline=None)
@given(lengths, st.integers(1, 9))
def test_budget_is_never_exceeded_and_every_item_is_in_exactly_one_place(lengths, num_ranks):
    items = items_of(lengths)
    packed = pack_round(items, num_ranks=num_ranks, max_tokens=BUDGET)
    tokens = {item.key: item.num_tokens for item in items}
    assert len(packed.bins) == num_ranks
    assert all(sum(tokens[key] for key in keys) <= BUDGET for keys in packed.bins)
    placed = [key for keys in packed.bins for key in keys] + [item.key for item in packed.leftover]
    assert sorted(placed) == sorted(tokens)


@settings(deadline=None)
@given(lengths, st.integers(1, 9))
def test_a_rank_is_empty_only_when_there_are_fewer_items_than_ranks(lengths, num_ranks):
    packed = pack_round(items_of(lengths), num_ranks=num_ranks, max_tokens=BUDGET)
    assert sum(bool(keys) for keys in packed.bins) == min(num_ranks, len(lengths))


@settings(max_examples=histories(100), deadline=None)
@given(lengths, st.integers(1, 5), st.randoms())
def test_packing_does_not_depend_on_the_order_of_arrival(lengths, num_ranks, rng):
    items = items_of(lengths)
    shuffled = rng.sample(items, len(items))
    assert pack_round(items, num_ranks=num_ranks, max_tokens=BUDGET) == pack_round(
        shuffled, num_ranks=num_ranks, max_tokens=BUDGET
    )


@settings(deadline=None)
@given(lengths.filter(len), st.integers(1, 9))
def test_what_waits_for_a_later_round_leaves_this_one_more_than_half_full(lengths, num_ranks):
    packed = pack_round(items_of(lengths), num_ranks=num_ranks, max_tokens=BUDGET)
    if packed.leftover:
        waiting = sum(item.num_tokens for item in packed.leftover)
        assert 2 * (sum(lengths) - waiting) > num_ranks * BUDGET


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
def test_heavy_tailed_lengths_need_hardly_more_rounds_than_the_lower_bound(num_ranks):
    items = items_of(heavy_tailed(4000, longest=4096))
    rounds = pack_rounds(items, num_ranks=num_ranks, max_tokens=4096)
    total = sum(item.num_tokens for item in items)
    lower_bound = math.ceil(total / (num_ranks * 4096))
    assert len(rounds) <= 1.03 * lower_bound + 1


def first_fit(items, num_ranks, max_tokens):
    room, bins = [max_tokens] * num_ranks, [[] for _ in range(num_ranks)]
    for item in items:
        rank = next((r for r in range(num_ranks) if room[r] >= item.num_tokens), None)
        if rank is not None:
            room[rank] -= item.num_tokens
            bins[rank].append(item.key)
    return bins


@pytest.mark.parametrize("seed", range(5))
def test_a_round_that_holds_everything_is_balanced_where_first_fit_is_not(seed):
    items = items_of(heavy_tailed(200, longest=2000, seed=seed))
    budget = int(1.2 * sum(item.num_tokens for item in items) / 8)
    packed = pack_round(items, num_ranks=8, max_tokens=max(budget, 2000))
    assert not packed.leftover
    costs = costs_of(packed.bins, items)
    ideal = max(sum(costs) / 8, max(item.cost for item in items))
    assert max(costs) <= 1.02 * ideal
    assert max(costs) < 0.8 * max(costs_of(first_fit(items, 8, max(budget, 2000)), items))


def test_full_rounds_stay_balanced():
    items = items_of(heavy_tailed(2000, longest=4096))
    packed = pack_round(items, num_ranks=8, max_tokens=8192)
    costs = costs_of(packed.bins, items)
    assert packed.leftover
    assert max(costs) / (sum(costs) / 8) < 1.3


def test_a_round_is_saved_when_balancing_alone_would_not_fit():
    lengths = [60, 50, 40, 30, 20]  # by cost: 60+30 and 50+40, and nowhere room for 20
    packed = pack_round(items_of(lengths), num_ranks=2, max_tokens=100)
    assert not packed.leftover
    assert sorted(sum(lengths[4 * o + i] for o, i in keys) for keys in packed.bins) == [100, 100]


def test_saving_a_round_leaves_no_rank_without_work():
    lengths = [49] * 8 + [32] * 9  # spread: 8 bins of 49 + 32, one left over; tightest: 7 bins
    packed = pack_round(items_of(lengths), num_ranks=8, max_tokens=100)
    assert all(packed.bins)


def test_cost_counts_the_squares_of_attention():
    items = [Item((0, 0), 400, estimate_cost(400, attention_ratio=100))]
    items += [Item((1, i), 50, estimate_cost(50, attention_ratio=100)) for i in range(8)]
    packed = pack_round(items, num_ranks=2, max_tokens=BUDGET)
    assert packed.bins == (((0, 0),), tuple((1, i) for i in range(8)))


def test_attention_ratio_is_where_attention_costs_as_much_as_the_rest():
    ratio = attention_ratio(num_parameters=12 * 4 * 128**2, num_layers=4, attention_width=128)
    assert estimate_cost(int(ratio), attention_ratio=ratio) == 2 * ratio == 2 * 12 * 128


def test_an_item_that_fits_no_bin_is_named():
    with pytest.raises(ValueError, match=r"\(1000\), got 1001 tokens in sample \(3, 1\)"):
        pack_round([Item((3, 1), 1001, 1.0)], num_ranks=2, max_tokens=BUDGET)
    with pytest.raises(ValueError, match="num_ranks"):
        pack_round([], num_ranks=0, max_tokens=BUDGET)


def test_ten_thousand_items_are_packed_within_a_second():
    items = items_of(heavy_tailed(10_000, longest=4096))
    begin = time.process_time()
    pack_round(items, num_ranks=64, max_tokens=16384)
    assert time.process_time() - begin < 1.0
