"""The planner: a table of inventories, and what holds for any of them."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.devices.placement import LEAST_SHARE, Demand, plan, plan_in_turns
from async_grpo.util.errors import ConfigError


def ranks(count):
    return Demand("trainer rank", count, weight=4)


def engines(count, devices=1, share=1.0):
    return Demand("generation worker", count, devices=devices, share=share, weight=4)


def scorers(count, share=1.0):
    return Demand("reference worker", count, share=share, weight=2)


def where(found):
    """{who: (node, devices, share)}"""
    return {seat.who: (seat.node, seat.devices, seat.share) for seat in found.seats}


QUICK_START = (engines(1), scorers(1))


@pytest.mark.parametrize(
    ("nodes", "num_ranks", "workers", "expected"),
    [
        ([0], 2, QUICK_START, {
            "trainer rank 0": (0, (), 1), "trainer rank 1": (0, (), 1),
            "generation worker 0": (0, (), 1), "reference worker 0": (0, (), 1)}),
        ([1], 2, QUICK_START, {
            "trainer rank 0": (0, (0,), 0.36), "generation worker 0": (0, (0,), 0.36),
            "reference worker 0": (0, (0,), 0.18)}),
        ([1], 2, (engines(1),), {
            "trainer rank 0": (0, (0,), 0.45), "generation worker 0": (0, (0,), 0.45)}),
        ([1], 1, (engines(1, share=0.5),), {
            "trainer rank 0": (0, (0,), 0.4), "generation worker 0": (0, (0,), 0.5)}),
        ([1], 4, (), {"trainer rank 0": (0, (0,), 1)}),
        ([2], 2, (), {"trainer rank 0": (0, (0,), 1), "trainer rank 1": (0, (1,), 1)}),
        ([2], 2, (engines(1),), {
            "trainer rank 0": (0, (0,), 1), "generation worker 0": (0, (1,), 1)}),
        ([2], 2, QUICK_START, {
            "trainer rank 0": (0, (0,), 1), "generation worker 0": (0, (1,), 0.6),
            "reference worker 0": (0, (1,), 0.3)}),
        ([8], 2, QUICK_START, {
            "trainer rank 0": (0, (0,), 1), "trainer rank 1": (0, (1,), 1),
            "generation worker 0": (0, (7,), 1), "reference worker 0": (0, (6,), 1)}),
        ([8], 8, (engines(1, 4),), {
            **{f"trainer rank {i}": (0, (i,), 1) for i in range(4)},
            "generation worker 0": (0, (4, 5, 6, 7), 1)}),
        ([8], 4, (engines(2, 2),), {
            **{f"trainer rank {i}": (0, (i,), 1) for i in range(4)},
            "generation worker 0": (0, (6, 7), 1), "generation worker 1": (0, (4, 5), 1)}),
        ([8, 8], 8, (engines(2, 4),), {
            **{f"trainer rank {i}": (0, (i,), 1) for i in range(8)},
            "generation worker 0": (1, (4, 5, 6, 7), 1),
            "generation worker 1": (1, (0, 1, 2, 3), 1)}),
        ([8, 8], 12, (engines(1, 4),), {
            **{f"trainer rank {i}": (i // 8, (i % 8,), 1) for i in range(12)},
            "generation worker 0": (1, (4, 5, 6, 7), 1)}),
        ([4], 4, (engines(4),), {
            "trainer rank 0": (0, (0,), 1), "trainer rank 1": (0, (1,), 1),
            "generation worker 0": (0, (3,), 1), "generation worker 1": (0, (2,), 1)}),
        ([3], 2, (engines(2), scorers(1), replace(scorers(1), who="teacher")), {  # three on two
            "trainer rank 0": (0, (0,), 1), "generation worker 0": (0, (1,), 0.45),
            "reference worker 0": (0, (1,), 0.45), "teacher 0": (0, (2,), 0.45)}),
    ],
)  # fmt: skip
def test_who_gets_which_device(nodes, num_ranks, workers, expected):
    assert where(plan(nodes, ranks=ranks(num_ranks), workers=workers)) == expected


@pytest.mark.parametrize(
    ("nodes", "workers", "said"),
    [
        ([1], (engines(1, 2),), "1 NVIDIA device cannot hold a trainer rank and 1 generation wor"),
        ([2], (engines(1, 2),), "2 NVIDIA devices cannot hold a trainer rank and 1 generation w"),
        ([2, 2], (engines(1, 4),), r"2 \+ 2 NVIDIA devices cannot .* of 4: lower --num-workers"),
        ([1], (engines(1),) * 9, "cannot hold a trainer rank and 1 generation"),
        ([1], (engines(1, share=0.95),), "share devices with --gpus-per-worker"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(nodes, workers, said):
    with pytest.raises(ConfigError, match=said):
        plan(nodes, ranks=ranks(1), workers=workers)


def test_the_plan_says_what_was_decided():
    assert plan([0], ranks=ranks(2), workers=QUICK_START).sentence == (
        "no NVIDIA device: everything runs on the CPUs"
    )
    assert plan([1], ranks=ranks(2), workers=QUICK_START).sentence == (
        "1 NVIDIA device: 1 trainer rank with 36% of a device and its memory, 1 generation worker "
        "with 36% of a device and its memory, 1 reference worker with 18% of a device and its "
        "memory (2 trainer ranks were asked for)"
    )
    assert plan([8], ranks=ranks(4), workers=[engines(2, 2)]).sentence == (
        "8 NVIDIA devices: 4 trainer ranks with a device each, 2 generation workers with 2 devices "
        "each"
    )


demands = st.lists(
    st.one_of(
        st.builds(engines, st.integers(0, 4), st.sampled_from([1, 2, 4])),
        st.builds(engines, st.integers(0, 3), st.just(1), st.sampled_from([0.25, 0.5, 0.7])),
        st.builds(scorers, st.integers(0, 4)),
    ),
    max_size=3,
)


@given(nodes=st.lists(st.integers(0, 8), min_size=1, max_size=3), num=st.integers(1, 12), d=demands)
def test_no_device_is_promised_twice_and_everybody_is_placed_or_refused(nodes, num, d):
    try:
        found = plan(nodes, ranks=ranks(num), workers=d)
    except ConfigError:
        assert sum(nodes)
        # One of each with devices of its own would have fitted one roomy node.
        assert 1 + sum(each.devices for each in d if each.count) > max(nodes)
        return
    taken = Counter()
    for seat in found.seats:
        for device in seat.devices:
            assert 0 <= device < nodes[seat.node]
            taken[seat.node, device] += seat.share
            assert LEAST_SHARE <= seat.share <= 1
        assert len(set(seat.devices)) == len(seat.devices)
    assert all(share <= 1 + 1e-9 for share in taken.values())
    for asked, placed in zip((ranks(num), *d), found.placed, strict=True):
        assert min(asked.count, 1) <= placed.count <= asked.count
        assert placed.share == asked.share or asked.share == 1  # what a user has fixed stays
    names = Counter(seat.who.rpartition(" ")[0] for seat in found.seats)
    for who in names:
        assert names[who] == sum(each.count for each in found.placed if each.who == who)
    if sum(nodes):
        assert all(seat.devices for seat in found.seats)


def in_turns(nodes, num_ranks, *workers):
    found = plan_in_turns(
        nodes, ranks=ranks(num_ranks), workers=workers, engines="generation worker"
    )
    return where(found)


def test_ranks_in_turns_have_the_devices_of_the_engines():
    found = in_turns([8], 8, engines(4, 2))
    taken = Counter(device for _, devices, _ in found.values() for device in devices)
    assert taken == dict.fromkeys(range(8), 2)
    assert {share for _, _, share in found.values()} == {1}
    assert [found[f"trainer rank {i}"][1] for i in range(8)] == [(i,) for i in range(8)]


def test_a_scorer_keeps_its_part_of_a_device_that_is_had_in_turns():
    found = in_turns([1], 1, *QUICK_START)
    assert found["trainer rank 0"] == found["generation worker 0"] == (0, (0,), 0.6)
    assert found["reference worker 0"] == (0, (0,), 0.3)


def test_fewer_devices_have_fewer_of_both_and_none_is_as_ever():
    found = in_turns([2], 4, engines(4))
    assert [name for name in found if "rank" in name] == ["trainer rank 0", "trainer rank 1"]
    assert in_turns([0], 2, engines(1)) == where(plan([0], ranks=ranks(2), workers=[engines(1)]))


@pytest.mark.parametrize(("nodes", "num_ranks"), [([8, 8], 2), ([8], 8)])
def test_turns_that_cannot_be_are_refused(nodes, num_ranks):
    with pytest.raises(ConfigError, match="--colocated needs one machine, and a device of a gen"):
        in_turns(nodes, num_ranks, engines(2))
