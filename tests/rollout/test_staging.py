"""Whatever was sent, the file holds the snapshot, or what is wrong with it is told."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from async_grpo.rollout.weights_update import StagedWeights
from async_grpo.types import WeightsDelta, WeightsVersion
from async_grpo.util.errors import WeightSyncError
from async_grpo.weight_sync.buckets import pack, view_tensor
from async_grpo.weight_sync.delta import encode

SHAPES = {"a": (300, 40), "b": (7,), "c": (100, 30)}


def tensors_of(seed, *, moved=()):
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.randn(s, generator=generator).bfloat16() for n, s in SHAPES.items()}
    for name in moved:
        tensors[name].view(-1)[5] += 1
    return tensors


def snapshot_of(batches, tensors, *, since=None):
    """In buckets of 8,000 bytes; with what changed `since` another snapshot."""
    version = WeightsVersion(0, batches)
    found = pack(tensors.items(), put=np.copy, version=version, bucket_bytes=8_000)
    found = replace(found, is_base=True)
    if since is None:
        return found
    deltas = [
        encode(new.data, old.data, item_bytes=2)
        for new, old in zip(found.buckets, since.buckets, strict=True)
    ]
    buckets = tuple(
        replace(bucket, delta=WeightsDelta(delta, delta.nbytes))
        for bucket, delta in zip(found.buckets, deltas, strict=True)
    )
    return replace(found, buckets=buckets, delta_since=since.version)


def load(staging, snapshot):
    """What was fetched, in bytes."""
    wanted = staging.begin(snapshot)
    for index, each in enumerate(wanted):
        staging.take(index, each.data)
    data = np.memmap(staging.path, dtype=np.uint8, mode="c")
    found = {meta.name: view_tensor(data, meta).clone() for meta in snapshot.tensors}
    staging.end()
    return found, sum(each.size_bytes for each in wanted)


def assert_loads(staging, snapshot, tensors, *, num_bytes):
    found, fetched = load(staging, snapshot)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert fetched == num_bytes


OLD, NEW, NEWER = tensors_of(0), tensors_of(0, moved="ac"), tensors_of(0, moved="aac")
FIRST = snapshot_of(0, OLD)
SECOND = snapshot_of(1, NEW, since=FIRST)
THIRD = snapshot_of(2, NEWER, since=SECOND)


def changed_bytes(snapshot):
    return sum(bucket.delta.size_bytes for bucket in snapshot.buckets)


def test_whoever_has_the_last_version_fetches_what_changed():
    staging = StagedWeights()
    assert_loads(staging, FIRST, OLD, num_bytes=FIRST.size_bytes)
    assert 0 < changed_bytes(SECOND) < FIRST.size_bytes / 100
    assert_loads(staging, SECOND, NEW, num_bytes=changed_bytes(SECOND))
    assert_loads(staging, THIRD, NEWER, num_bytes=changed_bytes(THIRD))


def test_a_joiner_and_who_missed_a_version_fetch_all():
    assert_loads(StagedWeights(), SECOND, NEW, num_bytes=SECOND.size_bytes)
    staging = StagedWeights()
    load(staging, FIRST)
    assert_loads(staging, THIRD, NEWER, num_bytes=THIRD.size_bytes)


def test_an_alias_of_the_last_version_is_as_good():
    staging = StagedWeights()
    load(staging, FIRST.renamed(WeightsVersion(0, 7)))
    assert_loads(staging, SECOND, NEW, num_bytes=changed_bytes(SECOND))


def test_a_bucket_of_which_too_much_changed_comes_whole():
    staging = StagedWeights()
    load(staging, FIRST)
    first, *others = SECOND.buckets
    mixed = replace(SECOND, buckets=(replace(first, delta=None), *others))
    expected = first.size_bytes + sum(bucket.delta.size_bytes for bucket in others)
    assert_loads(staging, mixed, NEW, num_bytes=expected)


def test_a_damaged_change_is_refused_and_all_is_fetched_the_next_time():
    staging = StagedWeights()
    load(staging, FIRST)
    for bucket in SECOND.buckets:
        if bucket.delta.size_bytes:
            bad = WeightsDelta(bucket.delta.data ^ np.uint8(1), bucket.delta.size_bytes)
            break
    damaged = tuple(replace(b, delta=bad) if b is bucket else b for b in SECOND.buckets)
    with pytest.raises(WeightSyncError, match="checksum"):
        load(staging, replace(SECOND, buckets=damaged))
    assert_loads(staging, SECOND, NEW, num_bytes=SECOND.size_bytes)


def test_weights_that_nothing_is_based_on_are_sent_whole_into_the_same_memory():
    staging = StagedWeights()
    load(staging, replace(FIRST, is_base=False))
    before = os.stat(staging.path).st_ino
    assert_loads(staging, SECOND, NEW, num_bytes=SECOND.size_bytes)
    assert os.stat(staging.path).st_ino == before
    smaller = {"b": OLD["b"]}
    assert_loads(staging, snapshot_of(3, smaller), smaller, num_bytes=14)
    assert os.stat(staging.path).st_size == 14  # no memory of the larger ones is kept


def test_who_still_reads_a_file_whose_update_failed_never_sees_the_next_one():
    staging = StagedWeights()
    load(staging, FIRST)
    staging.begin(SECOND)
    staging.take(0, SECOND.buckets[0].delta.data)  # half of it
    reader = np.memmap(staging.path, dtype=np.uint8, mode="r+")
    before = reader.copy()
    late = staging._file
    staging.drop()
    assert_loads(staging, THIRD, NEWER, num_bytes=THIRD.size_bytes)
    with pytest.raises(WeightSyncError, match="Bad file descriptor"):
        late.write(np.zeros(9, np.uint8), 0)  # a thread whose caller was cancelled
    assert np.array_equal(reader, before)
    data = np.memmap(staging.path, dtype=np.uint8, mode="c")
    assert all(torch.equal(view_tensor(data, m), NEWER[m.name]) for m in THIRD.tensors)
