"""Bytes in a bucket are the tensors that went in, or an error."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.types import WeightsVersion
from async_grpo.util.errors import WeightSyncError
from async_grpo.weight_sync.buckets import pack, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12)
VERSION = WeightsVersion(0, 0)


def random_tensors(specs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer.{i}.weight": torch.randn(shape, generator=generator).to(dtype)
        for i, (shape, dtype) in enumerate(specs)
    }


def packed(tensors, bucket_bytes, put=np.copy):
    return pack(iter(tensors.items()), put=put, version=VERSION, bucket_bytes=bucket_bytes)


def unpacked(snapshot):
    return list(unpack(snapshot, [bucket.data for bucket in snapshot.buckets]))


@given(specs=TENSORS, bucket_bytes=st.integers(1, 4096))
@settings(deadline=None, max_examples=80)
def test_every_tensor_comes_out_bitwise_as_it_went_in(specs, bucket_bytes):
    tensors = random_tensors(specs)
    snapshot = packed(tensors, bucket_bytes)
    found = unpacked(snapshot)
    assert [name for name, _ in found] == list(tensors)
    for name, tensor in found:
        assert tensor.dtype == tensors[name].dtype and tensor.shape == tensors[name].shape
        assert torch.equal(tensor, tensors[name])
    assert snapshot.size_bytes == sum(tensor.nbytes for tensor in tensors.values())


@given(specs=TENSORS, bucket_bytes=st.integers(1, 4096))
@settings(deadline=None, max_examples=40)
def test_all_buckets_but_the_last_are_full(specs, bucket_bytes):
    buckets = packed(random_tensors(specs), bucket_bytes).buckets
    assert all(bucket.size_bytes == bucket_bytes for bucket in buckets[:-1])
    assert all(0 < bucket.size_bytes <= bucket_bytes for bucket in buckets)


def test_all_buckets_are_laid_into_the_same_memory():
    tensors = random_tensors([((16,), torch.float32)] * 3)
    first, *others = (b.data for b in packed(tensors, 64, put=lambda data: data).buckets)
    assert [np.shares_memory(data, first) for data in others] == [True] * 2


@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_one_flipped_bit_anywhere_is_noticed(data):
    snapshot = packed(random_tensors([((5,), torch.bfloat16), ((3, 2), torch.float32)]), 16)
    bucket = data.draw(st.sampled_from(snapshot.buckets))
    position = data.draw(st.integers(0, bucket.size_bytes - 1))
    bucket.data[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WeightSyncError, match="checksum"):
        unpacked(snapshot)


def test_a_short_read_names_both_lengths():
    snapshot = packed(random_tensors([((8,), torch.float32)]), 4096)
    with pytest.raises(WeightSyncError, match="32 bytes, got 31"):
        list(unpack(snapshot, [snapshot.buckets[0].data[:-1]]))


def test_tensors_of_a_read_only_bucket_can_be_written():
    snapshot = packed(random_tensors([((8,), torch.float32)]), 4096)
    (bucket,) = snapshot.buckets
    bucket.data.flags.writeable = False  # as Ray gives it
    ((_, tensor),) = unpacked(snapshot)
    before = bucket.data.copy()
    tensor.add_(1)
    assert np.array_equal(bucket.data, before)


def test_a_packed_bucket_does_not_follow_later_changes_of_the_parameter():
    parameter = torch.nn.Parameter(torch.zeros(4))
    snapshot = packed({"w": parameter}, 4096)
    with torch.no_grad():
        parameter.add_(1)
    ((_, sent),) = unpacked(snapshot)
    assert sent.tolist() == [0, 0, 0, 0]


def test_an_unknown_dtype_is_an_error_of_weight_sync():
    snapshot = packed(random_tensors([((8,), torch.float32)]), 4096)
    tensors = (snapshot.tensors[0]._replace(dtype="float33"),)
    with pytest.raises(WeightSyncError, match="float33"):
        unpacked(dataclasses.replace(snapshot, tensors=tensors))
