"""Which device a rank takes where no worker can want it, and what no device can do."""

import pytest

from async_grpo.cluster.reservation import RankHere, own_device, rank_device
from async_grpo.devices import current
from async_grpo.devices.inventory import Device, Inventory
from async_grpo.util.errors import ConfigError


def machine(num_devices):
    return Inventory(tuple(Device(i, f"GPU-{i}", "A", 1) for i in range(num_devices)), "580.1")


def test_the_rank_is_that_of_torchrun_or_the_only_one():
    environ = {"RANK": "11", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    assert RankHere.of(environ) == RankHere(11, 3, 4)
    assert RankHere.of({}) == RankHere(0, 0, 1)


def test_ranks_take_devices_in_their_order():
    assert [own_device(machine(4), RankHere(i, i, 4), share=1.0) for i in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("num_devices", "share", "said"),
    [
        (1, 1.0, r"--nproc-per-node must be at most the devices of this machine .*, got 2"),
        (2, 0.5, "--gpus-per-rank must be 1 with 2 ranks on a machine, got 0.5"),
    ],
)
def test_ranks_that_nccl_would_refuse_are_refused(num_devices, share, said):
    with pytest.raises(ConfigError, match=said):
        own_device(machine(num_devices), RankHere(0, 0, 2), share=share)


def device(asks_ray):
    return rank_device(asks_ray=asks_ray, address="none:1", namespace="n", share=1.0)


def test_without_devices_nothing_is_asked_and_the_rank_is_on_the_cpu():
    with device(asks_ray=True) as position:
        assert position is None


def test_devices_that_torch_cannot_use_are_no_cpu_run(monkeypatch):
    monkeypatch.setattr(current, "usable_devices", lambda: machine(2))
    with (  # torch is built for CPUs here
        pytest.raises(ConfigError, match=r"torch must see the 2 x A .* of this machine, got 0"),
        device(asks_ray=False),
    ):
        pass
