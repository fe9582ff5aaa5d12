"""The NVIDIA device that this process uses, as torch sees it."""

from __future__ import annotations

import torch

from async_grpo.devices.checks import check_seen, usable_devices
from async_grpo.devices.inventory import Inventory


def device_id() -> str:
    """Its identity, the same in every process; empty without one."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def seen_devices() -> Inventory:
    """Those of this machine, all of which torch sees; none on a CPU.

    Raises `ConfigError` for devices that torch cannot use: nothing falls back to the CPU unsaid.
    """
    inventory = usable_devices()
    if inventory.devices:
        is_available = torch.cuda.is_available()
        check_seen(inventory, num_seen=torch.cuda.device_count() if is_available else 0)
    return inventory
