"""What a machine with devices may lack, each in one sentence with its remedy."""

import pytest

from async_grpo.devices import inventory
from async_grpo.devices.inventory import Device, Inventory
from async_grpo.util.errors import ConfigError


def make_inventory(driver="580.95.05", num_devices=1):
    devices = (Device(i, f"GPU-{i}", "NVIDIA H200", 143771) for i in range(num_devices))
    return Inventory(tuple(devices), driver)


@pytest.mark.parametrize("driver", ["535.183.06", "570.86.10", "", "N/A"])
def test_a_driver_older_than_the_wheels_is_refused(driver):
    with pytest.raises(ConfigError, match=r"must be 580 or newer for CUDA 13, got .*: update it"):
        inventory.check_driver(make_inventory(driver))


def test_a_driver_of_the_wheels_and_newer_ones_pass():
    for driver in ("580.65.06", "595.1"):
        inventory.check_driver(make_inventory(driver))


def test_headers_and_a_compiler_are_needed(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"has no Python.h: install them .*python3-dev"):
        inventory.check_headers(str(tmp_path))
    (tmp_path / "Python.h").touch()
    inventory.check_headers(str(tmp_path), "sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no my-cc: install gcc, or name one in CC"):
        inventory.check_headers(str(tmp_path), "my-cc")


def test_a_small_folder_of_shared_memory_is_refused(tmp_path):
    inventory.check_shared_memory(tmp_path, least=1)
    inventory.check_shared_memory(tmp_path / "none", least=1)
    with pytest.raises(ConfigError, match=r"got \d+ MiB: start the container with --shm-size"):
        inventory.check_shared_memory(tmp_path, least=1 << 60)


@pytest.mark.parametrize(
    ("has_folder", "library", "said"),
    [
        (True, "libc.so.6", ""),
        (False, "libc.so.6", "there is no "),
        (True, "libnone.so.1", "libnone.so.1 cannot be loaded"),
    ],
)
def test_machines_whose_nccl_would_take_sockets_are_told_of(has_folder, library, said, tmp_path):
    folder = tmp_path if has_folder else tmp_path / "infiniband"
    reason = inventory.lacks_rdma(folder, library)
    assert said in reason and bool(reason) == bool(said)


def test_devices_that_torch_does_not_see_are_an_error_and_no_cpu_run():
    inventory.check_seen(make_inventory(num_devices=2), num_seen=2)
    inventory.check_seen(Inventory(), num_seen=0)
    with pytest.raises(ConfigError, match=r"must see the 2 x NVIDIA H200 \(144 GB\) .*, got 0: "):
        inventory.check_seen(make_inventory(num_devices=2), num_seen=0)


def test_devices_that_a_torch_for_cpus_would_leave_idle_are_refused(monkeypatch):
    monkeypatch.setattr(inventory, "read_inventory", lambda: Inventory(num_unused=2))
    said = r"the 2 NVIDIA .*, got .*: `DEVICE=gpu make .* CUDA_VISIBLE_DEVICES= or"
    with pytest.raises(ConfigError, match=said):
        inventory.usable_devices()


def test_everything_is_checked_where_there_is_a_device(monkeypatch):
    asked = []
    monkeypatch.setattr(inventory, "read_inventory", make_inventory)
    for name in ("driver", "headers", "shared_memory"):
        monkeypatch.setattr(inventory, f"check_{name}", lambda *_, name=name: asked.append(name))
    assert len(inventory.usable_devices().devices) == 1
    assert asked == ["driver", "headers", "shared_memory"]
