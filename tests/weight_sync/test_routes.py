"""Which transport leads where.

Mutations seen to fail: `nccl` accepts a shared device; `ipc` accepts a worker with several devices
of which one is the trainer's; `ipc` compares with the first device only; the object store asks for
devices.
"""

import pytest

from async_grpo.errors import ConfigError
from async_grpo.types import WorkerInfo
from async_grpo.weight_sync.routes import check_route


def worker(*devices):
    return WorkerInfo("w7", "generation", "n", 1, "m", 128, 8.0, 0.0, 512, devices=devices)


@pytest.mark.parametrize("sender", ["", "GPU-a"])
@pytest.mark.parametrize("devices", [(), ("GPU-a",), ("GPU-b", "GPU-c")])
def test_the_object_store_leads_everywhere(sender, devices):
    check_route("object_store", worker(*devices), sender=sender)


def test_nccl_leads_from_one_device_to_others():
    check_route("nccl", worker("GPU-b"), sender="GPU-a")
    check_route("nccl", worker("GPU-b", "GPU-c"), sender="GPU-a")


def test_ipc_leads_to_the_one_device_that_is_shared():
    check_route("ipc", worker("GPU-a"), sender="GPU-a")


@pytest.mark.parametrize(
    ("transport", "sender", "devices", "complaint"),
    [
        ("nccl", "", ("GPU-b",), "trainer rank 0, which has none: use object_store"),
        ("ipc", "", ("GPU-b",), "trainer rank 0, which has none: use object_store"),
        ("nccl", "GPU-a", (), "worker w7 has none: use object_store"),
        ("ipc", "GPU-a", (), "worker w7 has none: use object_store"),
        ("nccl", "GPU-a", ("GPU-a",), "worker w7 share GPU-a: use ipc"),
        ("nccl", "GPU-a", ("GPU-b", "GPU-a"), "worker w7 share GPU-a: use ipc"),
        ("ipc", "GPU-a", ("GPU-b",), "rank 0 has GPU-a and worker w7 has GPU-b: use nccl"),
        ("ipc", "GPU-a", ("GPU-a", "GPU-b"), "worker w7 has GPU-a, GPU-b: use nccl"),
    ],
)
def test_a_transport_that_leads_nowhere_is_refused_with_one_that_does(
    transport, sender, devices, complaint
):
    with pytest.raises(ConfigError, match=f"--weight-transport {transport} .*{complaint}"):
        check_route(transport, worker(*devices), sender=sender)
