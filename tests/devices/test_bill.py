"""The bill of memory against arithmetic by hand, and against its own parts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.devices.bill import (
    ModelShape,
    Training,
    layer_token_bytes,
    trainer_bill,
    with_checkpointing_if_needed,
)

GB = 1e9
SEVEN_B = ModelShape(  # Qwen2.5-7B
    num_parameters=7_615_616_512,
    layer_parameters=233_057_792,
    root_parameters=2 * 152_064 * 3584 + 3584,
    num_layers=28,
    hidden=3584,
    intermediate=18_944,
    query_width=3584,
    key_width=512,
    num_heads=28,
    vocab_size=152_064,
)
EIGHT_RANKS = Training(shard_ranks=8, num_tokens=32_768, compute_bytes=2, checkpointing=True)
TRAININGS = st.builds(
    Training,
    shard_ranks=st.sampled_from([1, 2, 8]),
    num_tokens=st.integers(1, 40_000),
    compute_bytes=st.sampled_from([2, 4]),
    keeps_gathered=st.booleans(),
    checkpointing=st.integers(0, 28),
    defers=st.booleans(),
    offload=st.sampled_from(["none", "optimizer", "parameters"]),
)


def line(bill, name):
    (found,) = [each for each in bill.lines if each.name == name]
    return found.num_bytes


def test_seven_billion_on_eight_devices_with_checkpointing():
    bill = trainer_bill(SEVEN_B, EIGHT_RANKS)
    assert line(bill, "master weights") == pytest.approx(3.81 * GB, rel=0.01)
    assert line(bill, "AdamW's moments") == 2 * line(bill, "gradients")
    assert line(bill, "gathered embedding and head") == pytest.approx(2.18 * GB, rel=0.01)
    assert line(bill, "layers' inputs") == 32_768 * 28 * 3584 * 2
    # 16 H + 8 I of norms and MLP, and 2 (3 Q + 2 K) + 4 a head of attention, for each token
    expected = 32_768 * (16 * 3584 + 8 * 18_944 + 2 * (3 * 3584 + 2 * 512) + 4 * 28)
    assert line(bill, "layers' activations at a time") == expected
    assert 38 * GB < bill.total < 48 * GB  # fits 80 GB


def test_a_divided_optimizer_is_all_that_zero1_shares():
    alone = trainer_bill(SEVEN_B, replace(EIGHT_RANKS, shard_ranks=1))
    zero1 = trainer_bill(SEVEN_B, replace(EIGHT_RANKS, shard_ranks=1, moment_ranks=8))
    assert line(alone, "master weights") == 4 * SEVEN_B.num_parameters
    assert line(alone, "AdamW's moments") == 8 * SEVEN_B.num_parameters
    assert line(zero1, "AdamW's moments") == SEVEN_B.num_parameters
    assert alone.total - zero1.total == 7 * SEVEN_B.num_parameters


def test_without_checkpointing_the_defaults_are_a_hundred_gigabytes_of_activations():
    bill = trainer_bill(SEVEN_B, replace(EIGHT_RANKS, num_tokens=16_384, checkpointing=False))
    assert 95 * GB < line(bill, "layers' activations") < 115 * GB


def test_checkpointing_is_on_where_the_bill_without_it_does_not_fit():
    free = int(80 * GB)
    assert with_checkpointing_if_needed(SEVEN_B, EIGHT_RANKS, free_bytes=free).checkpointing
    short = replace(EIGHT_RANKS, num_tokens=2048)
    assert not with_checkpointing_if_needed(SEVEN_B, short, free_bytes=free).checkpointing


@given(one_in=st.integers(1, 28), layers=st.integers(1, 28))
def test_the_layers_that_recompute_are_counted_as_transformers_chooses_them(one_in, layers):
    model = replace(SEVEN_B, num_layers=layers)
    chosen = [number % one_in == 0 for number in range(layers)]
    bill = trainer_bill(model, replace(EIGHT_RANKS, checkpointing=one_in))
    assert line(bill, "layers' inputs") == sum(chosen) * 32_768 * 3584 * 2
    one = 32_768 * layer_token_bytes(model, 2)
    # When a layer recomputes, those before it hold what they kept, those behind it nothing.
    moments = [layers - sum(chosen)]
    moments += [1 + sum(not c for c in chosen[:at]) for at in range(layers) if chosen[at]]
    held = [each.num_bytes for each in bill.lines if each.name == "layers' activations at a time"]
    assert sum(held) == one * max(moments)


@given(tokens=st.integers(1, 40_000), free=st.integers(1, 300))
def test_as_few_layers_recompute_as_fit(tokens, free):
    training = replace(EIGHT_RANKS, num_tokens=tokens)
    found = with_checkpointing_if_needed(SEVEN_B, training, free_bytes=int(free * GB))
    order = [0, *range(28, 0, -1)]
    totals = [trainer_bill(SEVEN_B, replace(training, checkpointing=n)).total for n in order]
    at = order.index(found.checkpointing)
    assert all(total > free * GB for total in totals[:at])
    assert found.checkpointing == 1 or totals[at] <= free * GB


def test_what_is_offloaded_leaves_the_device_by_so_many_bytes():
    whole, own = trainer_bill(SEVEN_B, EIGHT_RANKS), SEVEN_B.num_parameters // 8
    for offload, num_bytes in (("optimizer", 8), ("parameters", 16)):
        bill = trainer_bill(SEVEN_B, replace(EIGHT_RANKS, offload=offload))
        assert whole.total - bill.total == num_bytes * own
        assert bill.on_host == 16 * own


@given(TRAININGS)
def test_every_line_is_something_and_the_words_name_it(training):
    bill = trainer_bill(SEVEN_B, training)
    assert all(each.num_bytes > 0 for each in bill.lines)
    assert bill.total + bill.on_host == sum(each.num_bytes for each in bill.lines)
    assert all(each.name in bill.in_words() for each in bill.lines)


@given(TRAININGS)
def test_more_tokens_fewer_ranks_and_whole_gradients_never_cost_less(training):
    least = trainer_bill(SEVEN_B, training).total
    more = {"num_tokens": training.num_tokens + 1000, "keeps_gathered": True, "defers": True}
    for name, value in more.items():
        assert trainer_bill(SEVEN_B, replace(training, **{name: value})).total >= least
    assert trainer_bill(SEVEN_B, replace(training, shard_ranks=1)).total >= least


def test_norms_of_heads_are_counted():
    plain, normed = (layer_token_bytes(replace(SEVEN_B, norms_heads=n), 2) for n in (False, True))
    assert normed - plain == (3584 + 512) * 6
