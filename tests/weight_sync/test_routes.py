"""Which transport leads where."""

from types import SimpleNamespace

import pytest

from async_grpo.types import WorkerInfo
from async_grpo.util.errors import ConfigError, WeightSyncError
from async_grpo.weight_sync.routes import check_group, check_route


def worker(*devices):
    return WorkerInfo("w7", "generation", "n", 1, "m", 128, 8.0, 0.0, 512, devices=devices)


@pytest.mark.parametrize("sender", ["", "GPU-a"])
@pytest.mark.parametrize("devices", [(), ("GPU-a",), ("GPU-b", "GPU-c")])
def test_the_object_store_leads_everywhere(sender, devices):
    check_route("object_store", worker(*devices), sender=sender)


def test_nccl_leads_from_one_device_to_others():
    check_route("nccl", worker("GPU-b"), sender="GPU-a")
    check_route("nccl", worker("GPU-b", "GPU-c"), sender="GPU-a")


@pytest.mark.parametrize(
    ("transport", "sender", "devices", "complaint"),
    [
        ("nccl", "", ("GPU-b",), "trainer rank 0, which has none: use object_store"),
        ("nccl", "GPU-a", (), "worker w7 has none: use object_store"),
        ("nccl", "GPU-a", ("GPU-a",), "worker w7 share GPU-a: use object_store"),
        ("nccl", "GPU-a", ("GPU-b", "GPU-a"), "worker w7 share GPU-a: use object_store"),
    ],
)
def test_a_transport_that_leads_nowhere_is_refused_with_one_that_does(
    transport, sender, devices, complaint
):
    with pytest.raises(ConfigError, match=f"--weight-transport {transport} .*{complaint}"):
        check_route(transport, worker(*devices), sender=sender)


def test_a_group_that_would_send_nothing_is_refused():
    check_group(SimpleNamespace(disabled=False))
    for useless in (None, SimpleNamespace(disabled=True)):
        with pytest.raises(WeightSyncError, match="needs the NCCL library"):
            check_group(useless)
