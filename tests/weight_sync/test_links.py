"""The trainer's calls to all workers: their order is vLLM's, and they have one deadline."""

import time

import numpy as np
import pytest
import torch
from fake_cluster import PENDING, FakeActor, FakeCluster

from async_grpo.types import WeightsVersion, WorkerInfo
from async_grpo.util.errors import DeadlineError, WeightSyncError, WorkerError
from async_grpo.weight_sync.buckets import pack, tensor_bytes
from async_grpo.weight_sync.publisher import Publisher
from async_grpo.weight_sync.transport import WorkersClient

NAMED = [(f"w{i}", torch.full((i + 1, 700), float(i))) for i in range(9)]


def snapshot_of(named, batches):
    version = WeightsVersion(0, batches)
    return pack(iter(named), put=np.copy, version=version, bucket_bytes=40_000)


def worker(name, num_devices):
    devices = tuple(f"GPU-{name}{i}" for i in range(num_devices))
    return WorkerInfo(name, "generation", "n", 1, "m", 128, 8.0, 0.0, 512, devices=devices)


def client_of(*handles, timeout_s=10.0, cluster=None):
    failures, snapshot = [], snapshot_of(NAMED, 3)
    members = {worker(f"w{i}", 2): handle for i, handle in enumerate(handles)}
    client = WorkersClient(members, cluster or FakeCluster())
    deadline = time.monotonic() + timeout_s
    client.prepare(snapshot, deadline=deadline, on_failure=failures.append)
    return client, failures, snapshot


def test_vllms_four_calls_reach_all_workers_each_with_ranks_of_its_own():
    handles, cluster = [FakeActor(), FakeActor()], FakeCluster()
    client, failures, snapshot = client_of(*handles, cluster=cluster)
    client.init_weight_transfer_engine({"world_size": 5, "rank_offset": 1})
    client.start_weight_update()
    client.update_weights({"names": ["w0"]})
    client.finish_weight_update()
    for handle, offset in zip(handles, (1, 3), strict=True):
        opened, received = handle.calls
        assert opened[:2] == ("open_route", {"world_size": 5, "rank_offset": offset})
        assert received[:3] == ("receive_weights", snapshot, {"names": ["w0"]})
        assert 5 < received[3] <= opened[2] <= 10, "the workers keep the same deadline"
    assert not failures
    waited = [who for who, _ in cluster.waited]
    assert waited == ["generation worker w0", "generation worker w1"] * 2


def test_an_update_has_one_deadline_and_who_misses_it_is_named():
    client, failures, _ = client_of(FakeActor(), FakeActor(receive_weights=PENDING), timeout_s=0.2)
    client.init_weight_transfer_engine({"rank_offset": 1})
    started = time.monotonic()
    with pytest.raises(DeadlineError, match="from worker w1"):
        client.update_weights({})
    assert time.monotonic() - started < 1
    assert len(failures) == 1


@pytest.mark.parametrize("error", [WeightSyncError("another model"), WorkerError("died")])
def test_a_failure_is_told_at_once_and_raised_though_others_go_on(error):
    first, second = FakeActor(receive_weights=PENDING), FakeActor(receive_weights=error)
    client, failures, _ = client_of(first, second)
    started = time.monotonic()
    with pytest.raises(type(error)):
        client.update_weights({})
    assert failures == [error] and time.monotonic() - started < 1


def test_the_parameters_of_a_snapshot_are_those_that_were_gathered():
    snapshot = snapshot_of(NAMED, 0)
    assert len(snapshot.buckets) > 2
    sent = list(Publisher(FakeCluster()).read(snapshot))
    assert [name for name, _ in sent] == [name for name, _ in NAMED]
    for (_, tensor), (_, original) in zip(sent, NAMED, strict=True):
        assert torch.equal(tensor, original)


def test_damaged_bytes_are_not_sent():
    snapshot = snapshot_of(NAMED, 0)
    snapshot.buckets[1].data[5] ^= np.uint8(1)
    sent = []
    with pytest.raises(WeightSyncError, match="checksum"):
        for name, _ in Publisher(FakeCluster()).read(snapshot):
            sent.append(name)
    end = snapshot.buckets[0].pieces[-1]
    whole = [m.name for m in snapshot.tensors if m.offset_bytes + tensor_bytes(m) <= sum(end)]
    assert sent == whole
