"""What the ranks store is the policy, each its share; what goes wrong on one is known to all."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fake_cluster import FakeCluster
from oracle import tiny_model
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from async_grpo.model.policy import PolicyModel, hf_named_parameters
from async_grpo.model.served import FlatShards, served
from async_grpo.types import WeightsVersion
from async_grpo.util.errors import WeightSyncError
from async_grpo.weight_sync.buckets import unpack
from async_grpo.weight_sync.delta import patch
from async_grpo.weight_sync.gather import Shards
from async_grpo.weight_sync.publisher import Collector

pytestmark = pytest.mark.integration
CPU = torch.device("cpu")
BUCKET_BYTES = 6_000  # so that the tiny model needs several rounds


class Store(FakeCluster):
    """The object store of one rank's machine."""

    def __init__(self):
        super().__init__()
        self.held, self.fails, self._count = {}, False, itertools.count()

    def export_reference(self, reference):
        return reference.key

    def put_bytes(self, data):
        if self.fails:
            raise WeightSyncError("the object store of this node did not take it")
        reference = Reference()
        reference.key = dist.get_rank(), next(self._count)  # two threads store
        self.held[reference.key] = data.copy(), reference
        return reference


class Reference:
    """Weakly known, as Ray's are counted."""


def sharded(mesh, *, tied=True):
    policy = PolicyModel(tiny_model(tied=tied))
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    return policy


def collect(collector, policy, batches):
    return collector.collect(
        FlatShards(served(policy, divided=True)), version=WeightsVersion(3, batches)
    ).wait()


def attempt(call):
    try:
        call()
    except WeightSyncError as error:
        return str(error)
    return ""


def all_of_it(rank, *, mesh_shape, tied):
    """Collect, fail twice, collect twice again."""
    store = Store()
    names = ("replicas", "shards") if len(mesh_shape) == 2 else None
    policy = sharded(init_device_mesh("cpu", mesh_shape, mesh_dim_names=names), tied=tied)
    options = {"device": CPU, "dtype": torch.bfloat16, "bucket_bytes": BUCKET_BYTES}
    collector = Collector(Shards.of(policy, served(policy)), store, **options)
    snapshot = collect(collector, policy, 1)
    expected = {n: p.full_tensor().detach().clone() for n, p in hf_named_parameters(policy)}
    first = dict(store.held), snapshot
    store.fails = rank == dist.get_world_size() - 1
    refused = attempt(lambda: collect(collector, policy, 2))
    store.fails = False
    shards = FlatShards(served(policy, divided=True))
    kept = shards[5][-1].clone() if shards[5].numel() else None
    if kept is not None and rank == 0:
        shards[5][-1] = float("inf")
    infinite = attempt(lambda: collect(collector, policy, 3))
    if kept is not None:
        shards[5][-1] = kept
    num_own = []
    for batches in (4, 5, 6):
        snapshot = collect(collector, policy, batches)
        num_own.append(len(collector._own))
    del snapshot
    patched = with_deltas(policy, shards, store)
    collector.collect(FlatShards(served(policy, divided=True)), version=WeightsVersion(3, 7)).wait()
    num_own.append(len(collector._own))
    kept = {key: data for key, (data, _) in first[0].items()}
    return {
        "snapshot": first[1], "held": kept, "expected": expected, "refused": refused,
        "infinite": infinite, "num_own": num_own, "patched": patched,
        "all_held": {key: data for key, (data, _) in store.held.items()},
        "names": [name for name, _ in Shards.of(policy, served(policy)).shapes],
    }  # fmt: skip


def with_deltas(policy, shards, store):
    """Two versions between which each rank moves one number."""
    collector = Collector(
        Shards.of(policy, served(policy)), store, device=CPU, dtype=torch.bfloat16,
        bucket_bytes=BUCKET_BYTES, with_deltas=True,
    )  # fmt: skip
    snapshots = [collect(collector, policy, 1)]
    moved = shards[0][:1].clone()
    shards[0][:1] += 1.0
    snapshots.append(collect(collector, policy, 2))
    shards[0][:1] = moved
    return snapshots


@pytest.mark.parametrize(
    ("mesh_shape", "tied"),
    [((1,), True), ((2,), False), ((3,), True), ((2, 2), True), ((2, 1), True)],
)
def test_every_rank_stores_its_share_and_all_hear_of_a_failure(tmp_path, mesh_shape, tied):
    num_ranks = int(np.prod(mesh_shape))
    found = run_ranks(
        all_of_it, num_ranks=num_ranks, folder=tmp_path, mesh_shape=mesh_shape, tied=tied
    )
    main = found[0]
    assert [rank["snapshot"] is None for rank in found] == [False] + [True] * (num_ranks - 1)
    held = {key: data for rank in found for key, data in rank["held"].items()}
    snapshot = main["snapshot"]
    data = [held[bucket.data] for bucket in snapshot.buckets]
    received = dict(unpack(snapshot, data))
    assert list(received) == list(main["expected"])
    for name, tensor in main["expected"].items():
        assert torch.equal(received[name], tensor.to(torch.bfloat16)), name
    total = sum(bucket.nbytes for bucket in data)
    num_shards = mesh_shape[-1] if mesh_shape[-1] > 1 else num_ranks  # else all hold the model
    assert total == 2 * sum(tensor.numel() for tensor in main["expected"].values())
    for number, rank in enumerate(found):
        stored = sum(each.nbytes for each in rank["held"].values())
        share = 1 / num_shards if number < num_shards else 0.0  # one replica alone
        assert stored / total == pytest.approx(share, rel=0.1), "its own rows"
        if number == num_ranks - 1 and num_shards < num_ranks:
            assert rank["refused"] == "", "it stores nothing, so that nothing can fail"
        else:
            assert "did not take it" in rank["refused"] or num_shards < num_ranks
        assert f"{main['names'][5]!r} of version 3.3 is not" in rank["infinite"]
        assert rank["num_own"][-1] <= 2, "what rank 0 no longer has is let go of"
    check_deltas(found, num_shards)


def check_deltas(found, num_shards):
    """The second version is the first with each rank's one number patched into it."""
    held = {key: data for rank in found for key, data in rank["all_held"].items()}
    first, second = found[0]["patched"]
    assert (first.is_base, second.is_base) == (True, True)
    assert first.delta_since is None and second.delta_since == first.version
    assert all(bucket.delta is None for bucket in first.buckets)
    sent = [bucket.delta.size_bytes for bucket in second.buckets]
    assert 0 < sum(sent) <= 60 * num_shards, "one number a rank, and some on the way to it"
    for old, new in zip(first.buckets, second.buckets, strict=True):
        data = held[old.data].copy()
        patch(data, held[new.delta.data], item_bytes=2)
        assert np.array_equal(data, held[new.data])
