"""A patched copy of the old bytes is the new bytes, whatever changed and wherever."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.util.errors import WeightSyncError
from async_grpo.weight_sync.delta import encode, patch


def bytes_of(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def patched(old, delta, item_bytes):
    data = old.copy()
    patch(data, delta, item_bytes=item_bytes)
    return data


@given(
    item_bytes=st.sampled_from([2, 4, 8]),
    count=st.integers(1, 3000),
    places=st.lists(st.integers(0, 2999), max_size=12),
)
@settings(deadline=None, max_examples=200)
def test_old_bytes_become_new_ones(item_bytes, count, places):
    old = bytes_of(count * item_bytes)
    new = old.copy()
    for place in places:
        new[(place % count) * item_bytes] ^= 1
    delta = encode(new, old, item_bytes=item_bytes)
    if delta is None:
        assert (len(set(places)) + count / 256) * (item_bytes + 1) >= new.nbytes
    else:
        assert delta.nbytes < new.nbytes
        assert np.array_equal(patched(old, delta, item_bytes), new)


def test_nothing_changed_is_nothing_to_send():
    old = bytes_of(64)
    assert encode(old.copy(), old, item_bytes=2).nbytes == 0
    assert np.array_equal(patched(old, np.zeros(0, np.uint8), 2), old)


def test_what_changes_everywhere_is_not_worth_it():
    assert encode(bytes_of(6000, 1), bytes_of(6000, 2), item_bytes=2) is None


def test_one_in_a_hundred_costs_some_hundredths():
    old = bytes_of(2_000_000)
    new = old.copy()
    new.view("u2")[np.random.default_rng(3).random(1_000_000) < 0.01] ^= 1
    delta = encode(new, old, item_bytes=2)
    assert 0.015 <= delta.nbytes / new.nbytes <= 0.017
    assert np.array_equal(patched(old, delta, 2), new)


def test_a_change_of_other_weights_is_refused():
    old = bytes_of(4000)
    new = old.copy()
    new[-1] ^= 1
    delta = encode(new, old, item_bytes=2)
    with pytest.raises(WeightSyncError, match="within its 2000 bytes"):
        patched(old[:2000], delta, 2)
    with pytest.raises(WeightSyncError):
        patched(old, delta[:-1], 2)
