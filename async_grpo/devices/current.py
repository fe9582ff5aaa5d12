"""What this process computes on, as torch sees it: its NVIDIA device, or its machine's cores."""

from __future__ import annotations

import os

import psutil
import torch

from async_grpo.devices.inventory import Inventory, check_seen, usable_devices


def device_id() -> str:
    """The uuid of this process's device, the same in every process; empty on CPUs."""
    return _uuid(torch.cuda.current_device()) if torch.cuda.is_available() else ""


def device_ids(count: int) -> tuple[str, ...]:
    """The uuids of the first `count` devices that this process sees."""
    return tuple(_uuid(index) for index in range(count))


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def seen_devices() -> Inventory:
    """The devices of this machine, all of which torch sees; none on a CPU.

    Raises `ConfigError` for devices that torch cannot use: nothing falls back to the CPU unsaid.
    """
    inventory = usable_devices()
    if inventory.devices:
        is_available = torch.cuda.is_available()
        check_seen(inventory, num_seen=torch.cuda.device_count() if is_available else 0)
    return inventory


def free_bytes(device: torch.device, *, share: float = 1.0) -> int:
    """Free memory of the device, at most `share` of the whole.

    On CPUs a rank has an equal part of what its machine has available.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(min(free, share * total))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(psutil.virtual_memory().available) // ranks_here
