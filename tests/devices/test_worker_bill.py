"""Bills of engines and scoring workers against arithmetic by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.devices.bill import (
    CPU_KV_CACHE_BYTES,
    GIB,
    GRAPHS_BYTES,
    Engine,
    Scoring,
    cache_bytes,
    cached_tokens,
    engine_bill,
    missing_bytes,
    scorer_bill,
)
from async_grpo.planning.asked import PUBLISHED, shape_of_config

SEVEN_B = shape_of_config(PUBLISHED["qwen2.5-7b"], who="7B")
H100 = Engine(may_take=int(0.92 * 80e9), num_seqs=256, batched_tokens=8192)
ENGINES = st.builds(
    Engine,
    devices=st.sampled_from([1, 2, 4, 8]),
    bytes_of_number=st.sampled_from([2, 4]),
    batched_tokens=st.integers(512, 32_768),
    num_seqs=st.integers(1, 1024),
    longest=st.integers(128, 32_768),
    may_take=st.integers(20 * GIB, 140 * GIB),
)


def line(bill, name):
    (found,) = [each for each in bill.lines if each.name == name]
    return found.num_bytes


def test_an_engine_s_weights_and_cache_are_divided_by_its_devices():
    engine = Engine(devices=2, cache_bytes=GIB, may_take=80 * GIB)
    bill = engine_bill(SEVEN_B, engine)
    assert line(bill, "weights") == SEVEN_B.num_parameters
    assert cached_tokens(SEVEN_B, engine) == 2 * GIB // (2 * 28 * 512 * 2)


def test_a_cache_takes_what_weights_and_activations_leave_of_a_device():
    bill = engine_bill(SEVEN_B, H100)
    weights = 2 * SEVEN_B.num_parameters
    activations = 2 * 8192 * (2 * 3584 + 3 * 18_944)
    logits = 12 * 256 * 152_064
    left = H100.may_take - weights - activations - logits - GRAPHS_BYTES
    assert line(bill, "keys and values") == left
    assert bill.total == H100.may_take
    assert bill.on_host == 2 * SEVEN_B.num_parameters + 16 * 256 * 4096


@given(ENGINES)
def test_an_engine_lacks_memory_exactly_where_its_longest_sequence_has_no_room(engine):
    has = cache_bytes(SEVEN_B, engine)
    token = 2 * 28 * 512 * engine.bytes_of_number / engine.devices
    lacking = missing_bytes(SEVEN_B, engine)
    assert (lacking == 0) == (has >= engine.longest * token)
    more = replace(engine, may_take=engine.may_take + lacking)
    assert missing_bytes(SEVEN_B, more) == 0


@given(ENGINES)
def test_more_devices_or_fewer_tokens_never_leave_less_cache(engine):
    more = replace(engine, devices=2 * engine.devices)
    fewer = replace(engine, batched_tokens=engine.batched_tokens // 2)
    assert cache_bytes(SEVEN_B, more) >= cache_bytes(SEVEN_B, engine)
    assert cache_bytes(SEVEN_B, fewer) >= cache_bytes(SEVEN_B, engine)


def test_on_a_cpu_the_head_is_held_a_second_time_and_the_cache_is_given():
    bill = engine_bill(SEVEN_B, Engine(bytes_of_number=4, cache_bytes=CPU_KV_CACHE_BYTES))
    assert line(bill, "packed head") == 4 * 3584 * 152_064
    assert line(bill, "keys and values") == CPU_KV_CACHE_BYTES
    assert missing_bytes(SEVEN_B, Engine(cache_bytes=1)) == 0


@given(st.integers(64, 65_536))
def test_a_scoring_worker_holds_one_layer_s_activations_and_a_chunk_of_logits(num_tokens):
    bill = scorer_bill(SEVEN_B, Scoring(num_tokens=num_tokens))
    assert line(bill, "logits") == 8 * min(1024, num_tokens) * 152_064
    assert line(bill, "activations") == num_tokens * (2 * 3 * 18_944 + 12 * 3584)
    assert bill.total == sum(each.num_bytes for each in bill.lines)
    updated = scorer_bill(SEVEN_B, Scoring(num_tokens=num_tokens, is_updated=True))
    assert updated.on_host == pytest.approx(2 * SEVEN_B.num_parameters)


@given(st.integers(2, 16))
def test_ranks_of_a_scoring_worker_hold_a_part_each_and_gather_two_layers_and_the_root(ranks):
    whole, own = (scorer_bill(SEVEN_B, Scoring(ranks=n, is_updated=True)) for n in (1, ranks))
    assert line(own, "weights") == -(-2 * SEVEN_B.num_parameters // ranks)
    gathered = 2 * (2 * SEVEN_B.layer_parameters + SEVEN_B.root_parameters)
    assert line(own, "gathered weights") == gathered
    assert whole.total - own.total == line(whole, "weights") - line(own, "weights") - gathered
    assert 0 <= ranks * own.on_host - whole.on_host < ranks  # one copy serves all
