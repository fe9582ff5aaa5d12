"""A rank's device is held in a real Ray, which counts devices that are not there."""

import os
import time

import pytest
import ray
from fake_cluster import FakeCluster
from local_ray import local_ray

from async_grpo.cluster import reservation
from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.reservation import RankHere, held_device
from async_grpo.devices.inventory import Device, Inventory
from async_grpo.util import deadlines
from async_grpo.util.errors import ClusterError, ConfigError

pytestmark = pytest.mark.integration
FOUR = Inventory(tuple(Device(i, f"GPU-{i}", "A", 1) for i in range(4)), "580.1")


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with local_ray(num_cpus=4, num_gpus=2, namespace="devices"):
        yield


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(deadlines, "ROOM_S", 1.0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def rank(number, of=2):
    return RankHere(number, number, of)


def worker_class():
    class Engine:  # local: Ray then sends its code, instead of a name that it cannot import
        async def devices(self):
            return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    return Engine


def start_worker(share):
    handle = ray.remote(worker_class()).options(num_cpus=0, num_gpus=share).remote()
    return handle, Cluster().wait(handle.devices.remote(), timeout_s=60.0, who="it")


def until_all_are_free():
    """What has been killed gives back what it held in a moment."""
    deadline = time.monotonic() + 30.0
    while Cluster().free_here().get("GPU") != 2.0:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_ranks_and_workers_get_different_devices_and_who_comes_too_late_hears_of_them():
    with held_device(Cluster(), FOUR, rank(0), share=1.0) as device:
        worker, [other] = start_worker(1.0)
        assert {str(device), other} == {"0", "1"}
        with (
            pytest.raises(
                ClusterError,
                match=r"trainer rank 1 needs 1 of a device, and Ray has 0 of 2 free on this node, "
                rf"held by DeviceHolder \(process \d+, GPU {device}\), "
                rf"[\w.<>]*Engine \(process \d+, GPU {other}\): stop",
            ),
            held_device(Cluster(), FOUR, rank(1), share=1.0),
        ):
            pass
    ray.kill(worker)
    until_all_are_free()


def test_one_device_is_shared_by_fractions():
    with held_device(Cluster(), FOUR, rank(0, of=1), share=0.36) as device:
        engine, of_engine = start_worker(0.36)
        scorer, of_scorer = start_worker(0.18)
        assert of_engine == of_scorer == [str(device)]
        ray.kill(engine)
        ray.kill(scorer)


def test_a_trainer_whose_devices_ray_was_not_given_takes_its_own(monkeypatch):
    hidden = Inventory(FOUR.devices[2:], "580.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    # The processes of Ray have been started without it: to them all four are there.
    monkeypatch.setattr(reservation.DeviceHolder, "visible", visible_to_ray("0,1"))
    until_all_are_free()
    with held_device(Cluster(), hidden, rank(1), share=1.0) as device:
        assert device == 1
        assert Cluster().free_here()["GPU"] == 2.0
    monkeypatch.setattr(reservation.DeviceHolder, "visible", visible_to_ray("1,2"))
    with (
        pytest.raises(ConfigError, match=r"was given device [01] by Ray, which CUDA_VISIBLE_DEVI"),
        held_device(Cluster(), hidden, rank(0), share=1.0),
    ):
        pass


def visible_to_ray(names):
    async def visible(self):
        return names

    return visible


def test_a_node_whose_ray_counts_no_device_leaves_them_to_the_ranks():
    with held_device(FakeCluster(), FOUR, rank(1), share=1.0) as device:
        assert device == 1
    assert os.environ.get("CUDA_VISIBLE_DEVICES") is None
