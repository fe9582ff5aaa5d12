"""Plans of whole steps: within the budget, alike for any order, near what no plan can beat."""

import random

import numpy as np
import pytest
from effort import histories
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.batching.admission import StepKey
from async_grpo.batching.packing import Item, estimate_cost, pack_round, pack_rounds
from async_grpo.batching.rounds import RoundFormer
from benchmarks.packing import SHAPES, Case, lengths_of, plan

BUDGET = 1000
STEP = StepKey(0, 0)
lengths = st.lists(st.integers(1, BUDGET) | st.integers(1, 60), max_size=60)


def items_of(lengths):
    return [
        Item((i // 4, i % 4), n, estimate_cost(n, attention_ratio=500))
        for i, n in enumerate(lengths)
    ]


@settings(max_examples=histories(50), deadline=None)
@given(lengths, st.integers(1, 9))
def test_every_sample_goes_out_once_within_the_budget(lengths, num_ranks):
    items = items_of(lengths)
    rounds = pack_rounds(items, num_ranks=num_ranks, max_tokens=BUDGET)
    tokens = {item.key: item.num_tokens for item in items}
    bins = [keys for round_ in rounds for keys in round_]
    assert sorted(key for keys in bins for key in keys) == sorted(tokens)
    assert all(sum(tokens[key] for key in keys) <= BUDGET for keys in bins)
    assert all(len(round_) == num_ranks and any(round_) for round_ in rounds)
    if len(lengths) >= len(bins):
        assert sum(map(bool, bins)) > len(bins) - num_ranks  # fillers in one round at most


@settings(max_examples=histories(50), deadline=None)
@given(lengths, st.integers(1, 5), st.randoms())
def test_the_plan_does_not_depend_on_the_order_of_arrival(lengths, num_ranks, rng):
    items = items_of(lengths)
    shuffled = rng.sample(items, len(items))
    plan = pack_rounds(items, num_ranks=num_ranks, max_tokens=BUDGET)
    assert plan == pack_rounds(shuffled, num_ranks=num_ranks, max_tokens=BUDGET)


@settings(max_examples=histories(50), deadline=None)
@given(lengths, st.integers(1, 4), st.randoms())
def test_a_complete_step_goes_out_as_one_plan(lengths, num_ranks, rng):
    items = items_of(lengths)
    former = RoundFormer(num_ranks, max_tokens=BUDGET, steps_per_batch=1, deterministic=True)
    for item in rng.sample(items, len(items)):
        former.offer(STEP, item=item)
        assert former.next_round(0.0, hungry=True) is None
    former.step_complete(STEP)
    sent = []
    while not isinstance(formed := former.next_round(0.0, hungry=True), StepKey):
        sent.append(formed.bins)
        assert former.num_ready == len(items) - sum(len(keys) for bins in sent for keys in bins)
    assert sent == pack_rounds(items, num_ranks=num_ranks, max_tokens=BUDGET)


def test_a_round_of_an_unfinished_step_is_chosen_from_the_oldest():
    former = RoundFormer(2, max_tokens=100, steps_per_batch=1)
    for ordinal in range(1000):
        former.offer(STEP, item=Item((ordinal, 0), 40, 40.0))
    sent = former.next_round(0.0, hungry=False)
    assert max(ordinal for keys in sent.bins for ordinal, _ in keys) <= 10
    assert former.num_ready == 996


def test_the_small_samples_of_an_unfinished_step_wait_to_fill_gaps():
    former = RoundFormer(1, max_tokens=100, steps_per_batch=1)
    for ordinal, num_tokens in enumerate([10, 10, 90, 90, 10, 80]):
        former.offer(STEP, item=Item((ordinal, 0), num_tokens, float(num_tokens)))
    first, second = (former.next_round(0.0, hungry=False).bins for _ in range(2))
    assert (first, second) == ((((0, 0), (2, 0)),), (((1, 0), (3, 0)),))


def test_the_time_of_a_step_is_that_of_its_slowest_ranks():
    items = [Item((i, 0), n, float(n)) for i, n in enumerate([90, 80, 50, 40])]
    rounds = pack_rounds(items, num_ranks=2, max_tokens=100)  # alike bins meet: 90 + 50
    assert rounds == [(((0, 0),), ((1, 0),)), (((2, 0),), ((3, 0),))]


@pytest.mark.parametrize("shape", SHAPES)
def test_plans_are_near_the_lower_bound(shape):
    slowness = []
    for num_ranks in (2, 8, 64):
        for max_tokens in (16_384, 32_768):
            for count in (256, 1024):
                case = Case(lengths_of(shape, count), num_ranks, max_tokens, 22_973.0)
                found = plan(case)
                slowness.append(found.slowness)
                assert found.num_rounds <= found.fewest_rounds + 1
    assert np.median(slowness) <= 1.005
    assert np.mean(slowness) <= 1.03
    assert max(slowness) <= 1.25


def test_bins_stay_full_where_thousands_of_samples_hardly_fit():
    rng = random.Random(0)
    lengths = [min(4096, int(60 * rng.paretovariate(1.1))) for _ in range(4000)]
    rounds = pack_rounds(items_of(lengths), num_ranks=8, max_tokens=4096)
    assert len(rounds) <= 1 + sum(lengths) // (8 * 4096)


@settings(max_examples=histories(50), deadline=None)
@given(lengths, st.integers(1, 9))
def test_no_item_waits_that_had_room(lengths, num_ranks):
    items = items_of(lengths)
    packed = pack_round(items, num_ranks=num_ranks, max_tokens=BUDGET)
    tokens = {item.key: item.num_tokens for item in items}
    used = [sum(tokens[key] for key in keys) for keys in packed.bins]
    assert all(min(used) + item.num_tokens > BUDGET for item in packed.leftover)
