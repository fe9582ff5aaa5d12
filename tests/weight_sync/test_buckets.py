"""Bytes in a bucket are the tensors that went in, or an error."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.errors import WeightSyncError
from async_grpo.weight_sync.buckets import pack_buckets, unpack_bucket

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12)


def random_tensors(specs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer.{i}.weight": torch.randn(shape, generator=generator).to(dtype)
        for i, (shape, dtype) in enumerate(specs)
    }


def packed(tensors, bucket_bytes):
    return list(pack_buckets(iter(tensors.items()), put=np.copy, bucket_bytes=bucket_bytes))


@given(specs=TENSORS, bucket_bytes=st.integers(1, 4096))
@settings(deadline=None, max_examples=80)
def test_every_tensor_comes_out_bitwise_as_it_went_in(specs, bucket_bytes):
    tensors = random_tensors(specs)
    found = [
        pair
        for bucket in packed(tensors, bucket_bytes)
        for pair in unpack_bucket(bucket, bucket.data)
    ]
    assert [name for name, _ in found] == list(tensors)
    for name, tensor in found:
        assert tensor.dtype == tensors[name].dtype and tensor.shape == tensors[name].shape
        assert torch.equal(tensor, tensors[name])


@given(specs=TENSORS, bucket_bytes=st.integers(1, 4096))
@settings(deadline=None, max_examples=40)
def test_only_a_single_large_tensor_exceeds_a_bucket(specs, bucket_bytes):
    for bucket in packed(random_tensors(specs), bucket_bytes):
        assert bucket.size_bytes <= bucket_bytes or len(bucket.tensors) == 1


@given(specs=TENSORS, bucket_bytes=st.integers(1, 4096))
@settings(deadline=None, max_examples=40)
def test_memory_that_held_something_else_gives_the_same_bytes_as_new_memory(specs, bucket_bytes):
    tensors = random_tensors(specs)
    for bucket in packed(tensors, bucket_bytes):  # all but the first in memory of the one before
        (alone,) = packed({meta.name: tensors[meta.name] for meta in bucket.tensors}, bucket_bytes)
        assert (alone.tensors, alone.checksum) == (bucket.tensors, bucket.checksum)
        assert alone.data.tobytes() == bucket.data.tobytes()


def test_buckets_of_one_size_are_laid_into_the_same_memory():
    tensors = random_tensors([((16,), torch.float32)] * 3)
    each = pack_buckets(iter(tensors.items()), put=lambda data: data, bucket_bytes=64)
    first, *others = (bucket.data for bucket in each)
    assert [np.shares_memory(data, first) for data in others] == [True] * 2


@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_one_flipped_bit_anywhere_is_noticed(data):
    (bucket,) = packed(random_tensors([((5,), torch.bfloat16), ((3, 2), torch.float32)]), 4096)
    damaged = bucket.data.copy()
    position = data.draw(st.integers(0, bucket.size_bytes - 1))
    damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WeightSyncError, match="checksum"):
        list(unpack_bucket(bucket, damaged))


def test_a_short_read_names_both_lengths():
    (bucket,) = packed(random_tensors([((8,), torch.float32)]), 4096)
    with pytest.raises(WeightSyncError, match="32 bytes, got 31"):
        list(unpack_bucket(bucket, bucket.data[:-1]))


def test_tensors_of_a_read_only_bucket_can_be_written():
    (bucket,) = packed(random_tensors([((8,), torch.float32)]), 4096)
    bucket.data.flags.writeable = False  # as Ray gives it
    ((_, tensor),) = unpack_bucket(bucket, bucket.data)
    before = bucket.data.copy()
    tensor.add_(1)
    assert np.array_equal(bucket.data, before)


def test_a_packed_bucket_does_not_follow_later_changes_of_the_parameter():
    parameter = torch.nn.Parameter(torch.zeros(4))
    (bucket,) = pack_buckets(iter([("w", parameter)]), put=np.copy)
    with torch.no_grad():
        parameter.add_(1)
    ((_, sent),) = unpack_bucket(bucket, bucket.data)
    assert sent.tolist() == [0, 0, 0, 0]


def test_an_unknown_dtype_is_an_error_of_weight_sync():
    (bucket,) = packed(random_tensors([((8,), torch.float32)]), 4096)
    bucket = dataclasses.replace(bucket, tensors=(bucket.tensors[0]._replace(dtype="float33"),))
    with pytest.raises(WeightSyncError, match="float33"):
        list(unpack_bucket(bucket, bucket.data))
