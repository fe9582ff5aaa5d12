"""The NVIDIA device that this process uses, as torch sees it."""

from __future__ import annotations

import torch


def device_id() -> str:
    """Its identity, the same in every process; empty without one."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
