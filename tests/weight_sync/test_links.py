"""The trainer's calls to one worker: their order is vLLM's, and each has the update's deadline."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from async_grpo import cluster
from async_grpo.errors import DeadlineError, WeightSyncError, WorkerError
from async_grpo.types import WeightsVersion
from async_grpo.weight_sync.buckets import pack
from async_grpo.weight_sync.layout import tensor_bytes
from async_grpo.weight_sync.links import WorkerClient, device_tensors

NAMED = [(f"w{i}", torch.full((i + 1, 700), float(i))) for i in range(9)]


def snapshot_of(named, batches):
    version = WeightsVersion(0, batches)
    return pack(iter(named), put=np.copy, version=version, bucket_bytes=40_000)


class FakeHandle:
    """An actor whose calls are recorded, and answered with what `answers` says."""

    def __init__(self, **answers):
        self.calls, self.answers = [], answers

    def __getattr__(self, method):
        def remote(*arguments):
            self.calls.append((method, *arguments))
            return self.answers.get(method)

        return SimpleNamespace(remote=remote)


@pytest.fixture
def waits(monkeypatch):
    """(seconds, who) of each wait; an answer that is an error is raised."""
    seen = []

    def wait(call, *, timeout_s, who):
        seen.append((timeout_s, who))
        if isinstance(call, Exception):
            raise call
        return call

    monkeypatch.setattr(cluster, "wait", wait)
    return seen


def client_of(handle, snapshot, *, timeout_s=10.0):
    failures = []
    client = WorkerClient(handle, who="generation worker w")
    deadline = time.monotonic() + timeout_s
    client.prepare(snapshot, deadline=deadline, on_failure=failures.append)
    return client, failures


def test_vllms_four_calls_reach_the_worker_with_what_they_bring(waits):
    handle, snapshot = FakeHandle(), snapshot_of(NAMED, 3)
    client, failures = client_of(handle, snapshot)
    client.init_weight_transfer_engine({"world_size": 2})
    client.start_weight_update()
    client.update_weights({"names": ["w0"]})
    client.finish_weight_update()
    opened, expected, received = handle.calls
    assert opened[:2] == ("open_route", {"world_size": 2})
    assert expected == ("expect_weights", snapshot)
    assert received[:3] == ("receive_weights", snapshot, {"names": ["w0"]})
    assert 5 < received[3] <= opened[2] <= 10, "the worker keeps the same deadline"
    assert not failures and {who for _, who in waits} == {"generation worker w"}


def test_an_update_has_one_deadline_and_not_one_a_call(waits):
    client, _ = client_of(FakeHandle(), snapshot_of(NAMED, 0), timeout_s=0.2)
    client.init_weight_transfer_engine({})
    time.sleep(0.1)
    client.start_weight_update()
    time.sleep(0.15)
    client.update_weights({})
    first, second, third = (seconds for seconds, _ in waits)
    assert first <= 0.2 and second <= first - 0.1 and third == 0


@pytest.mark.parametrize("error", [WeightSyncError("another model"), WorkerError("died")])
def test_a_failure_is_told_at_once_and_raised(waits, error):
    client, failures = client_of(FakeHandle(receive_weights=error), snapshot_of(NAMED, 0))
    client.start_weight_update()
    with pytest.raises(type(error)):
        client.update_weights({})
    assert failures == [error]


def test_a_worker_that_does_not_answer_is_a_failure_too(waits):
    client, failures = client_of(FakeHandle(open_route=DeadlineError("w")), snapshot_of(NAMED, 0))
    with pytest.raises(DeadlineError):
        client.init_weight_transfer_engine({})
    assert len(failures) == 1


def test_the_parameters_of_a_snapshot_are_those_that_were_gathered(waits):
    snapshot = snapshot_of(NAMED, 0)
    assert len(snapshot.buckets) > 2
    sent = list(device_tensors(snapshot, torch.device("cpu")))
    assert [name for name, _ in sent] == [name for name, _ in NAMED]
    for (_, tensor), (_, original) in zip(sent, NAMED, strict=True):
        assert torch.equal(tensor, original)


def test_damaged_bytes_are_not_sent(waits):
    snapshot = snapshot_of(NAMED, 0)
    snapshot.buckets[1].data[5] ^= np.uint8(1)
    sent = []
    with pytest.raises(WeightSyncError, match="checksum"):
        for name, _ in device_tensors(snapshot, torch.device("cpu")):
            sent.append(name)
    end = snapshot.buckets[0].pieces[-1]
    whole = [m.name for m in snapshot.tensors if m.offset_bytes + tensor_bytes(m) <= sum(end)]
    assert sent == whole
