"""Every byte of every parameter is in one bucket, and every rank stores as much as any other."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.types import Piece, WeightsBucket
from async_grpo.util import deadlines
from async_grpo.util.errors import DeadlineError, WeightSyncError
from async_grpo.weight_sync.buckets import check_whole, laid_out_bytes, lay_out, owner_of
from async_grpo.weight_sync.gather import NUM_HOST_BUFFERS, Gather, GatherPlan

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=8)
RANKS = st.integers(1, 5)


def tensors_of(shapes, dtype="bfloat16"):
    return tuple(lay_out((f"w{i}", dtype, shape) for i, shape in enumerate(shapes)))


def buckets_of(plan):
    pieces = [plan.pieces(bucket) for bucket in range(plan.num_buckets)]
    return [WeightsBucket(p, None, sum(size for _, size in p), 0) for p in pieces]


@given(shapes=SHAPES, num_ranks=RANKS, bucket_bytes=st.integers(1, 200))
@settings(deadline=None, max_examples=200)
def test_the_buckets_of_a_plan_hold_every_byte_once(shapes, num_ranks, bucket_bytes):
    plan = GatherPlan(tensors_of(shapes), num_ranks, bucket_bytes)
    buckets = buckets_of(plan)
    check_whole(plan.tensors, buckets)
    total = sum(math.prod(shape) for shape in shapes) * 2
    assert sum(bucket.size_bytes for bucket in buckets) == total
    assert all(bucket.size_bytes <= plan.most_elements * 2 for bucket in buckets)


@given(shapes=SHAPES, num_ranks=RANKS, bucket_bytes=st.integers(1, 200))
@settings(deadline=None, max_examples=100)
def test_rows_come_out_at_the_places_that_pieces_name(shapes, num_ranks, bucket_bytes):
    """Each rank's, cut as FSDP2 cuts them."""
    plan = GatherPlan(tensors_of(shapes), num_ranks, bucket_bytes)
    whole = [np.arange(math.prod(shape)).reshape(shape or 1) for shape in shapes]
    laid_out = np.full(laid_out_bytes(plan.tensors) // 2, -1)
    for bucket in range(plan.num_buckets):
        rank, held = bucket % num_ranks, []
        for index, start, stop in plan.slices(bucket):
            rows = -(-len(whole[index]) // num_ranks)
            local = whole[index][rank * rows : (rank + 1) * rows].reshape(-1)
            assert len(local) == plan.num_held(index, rank)
            held += local[start:stop].tolist()
        assert len(held) == plan.num_elements(bucket) <= plan.most_elements
        for offset, size in plan.pieces(bucket):
            laid_out[offset // 2 : (offset + size) // 2] = held[: size // 2]
            del held[: size // 2]
        assert not held
    for meta, values in zip(plan.tensors, whole, strict=True):
        start = meta.offset_bytes // 2
        assert laid_out[start : start + values.size].tolist() == values.reshape(-1).tolist()


SMOLLM2_135M = [(49152, 576), *[(576, 576), (192, 576), (192, 576), (576, 576)] * 30,
                *[(1536, 576), (1536, 576), (576, 1536), (576,), (576,)] * 30, (576,)]  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("bucket_mib", [4, 64, 256])
def test_every_rank_stores_its_share_of_a_model(num_ranks, bucket_mib):
    plan = GatherPlan(tensors_of(SMOLLM2_135M), num_ranks, bucket_mib << 20)
    total = sum(math.prod(shape) for shape in SMOLLM2_135M)
    stored = np.zeros(num_ranks)
    for bucket in range(plan.num_buckets):
        stored[bucket % num_ranks] += plan.num_elements(bucket)
    assert (stored * num_ranks / total).max() <= 1.02, "the last one may have less"
    held = [plan.num_held(i, r) for i in range(len(plan.tensors)) for r in range(num_ranks)]
    assert np.array_equal(stored, np.reshape(held, (-1, num_ranks)).sum(0)), "its FSDP shard, once"
    assert plan.most_elements * 2 <= bucket_mib << 20


def test_who_reads_buckets_in_order_has_few_parameters_begun():
    plan = GatherPlan(tensors_of(SMOLLM2_135M), 4, 4 << 20)
    missing = [2 * math.prod(shape) for shape in SMOLLM2_135M]
    most = begun = 0
    for bucket in range(plan.num_buckets):
        for offset, size in plan.pieces(bucket):
            index = owner_of(plan.tensors, offset)
            begun += size
            missing[index] -= size
            begun -= 0 if missing[index] else 2 * math.prod(SMOLLM2_135M[index])
        most = max(most, begun)
    largest = 2 * math.prod(SMOLLM2_135M[0])
    assert not begun and most <= largest + 2 * 4 * (4 << 20)


def test_bytes_that_are_missing_doubled_or_nobodys_are_told():
    tensors = tensors_of([(8,), (40,)], "float32")

    def check(*pieces):
        check_whole(tensors, [WeightsBucket(tuple(Piece(*p) for p in pieces), None, 0, 0)])

    check((0, 32), (64, 160))
    check((64, 100), (0, 32), (164, 60))
    with pytest.raises(WeightSyncError, match="1 are missing or incomplete, the first is 'w1'"):
        check((0, 32), (64, 100), (200, 24))
    with pytest.raises(WeightSyncError, match="1 are missing or incomplete, the first is 'w0'"):
        check((64, 160))
    with pytest.raises(WeightSyncError, match="must be sent once"):
        check((0, 32), (64, 160), (100, 4))
    for stray in ((0, 40), (64, 160)), ((0, 32), (64, 160), (300, 4)), ((0, 32), (40, 8)):
        with pytest.raises(WeightSyncError, match="must lie within a parameter"):
            check(*stray)


def test_a_plan_of_nothing_has_no_buckets():
    assert GatherPlan((), 4, 100).num_buckets == 0
    assert dataclasses.astuple(GatherPlan(tensors_of([(0, 3)]), 2, 100))[1:] == (2, 100)
    assert GatherPlan(tensors_of([(0, 3)]), 2, 100).num_buckets == 0


def test_a_rank_hears_when_all_of_its_buffers_are_held_and_is_told_of_those_that_stay(monkeypatch):
    monkeypatch.setattr(deadlines, "BUCKET_STORED_S", 0.1)
    plan = GatherPlan(tensors_of([(40,)], "float32"), 1, 8)
    gather = Gather(plan, 0, device=torch.device("cpu"))
    values, held, found = torch.arange(40.0), [], []
    for received in gather.rounds([values]):
        held.append(received)
        found += received.data.tolist()
        if not gather.has_room:
            assert len(held) == NUM_HOST_BUFFERS
            while held:
                gather.free(held.pop())
    assert found == values.tolist()
    with pytest.raises(DeadlineError, match=r"no bucket of weights was stored within 0.1 s"):
        list(gather.rounds([values]))


def test_a_bucket_tells_of_a_number_that_is_not_finite():
    plan = GatherPlan(tensors_of([(4,)], "float32"), 1, 8)
    gather = Gather(plan, 0, device=torch.device("cpu"))
    first, second = gather.rounds([torch.tensor([1.0, 2.0, 3.0, math.nan])])
    assert first.is_finite() and not second.is_finite()
