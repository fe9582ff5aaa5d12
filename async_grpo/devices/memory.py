"""How much memory is free where this process computes."""

from __future__ import annotations

import os

import psutil
import torch


def free_bytes(device: torch.device, *, share: float = 1.0) -> int:
    """Of the device, of which `share` may be taken; on CPUs this rank's part of its machine's."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(min(free, share * total))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(psutil.virtual_memory().available) // ranks_here
