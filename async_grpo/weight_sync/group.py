"""What vLLM's NCCL engines leave unsaid about the group that they have made."""

from __future__ import annotations

from typing import Any

from async_grpo.errors import WeightSyncError


def check_group(group: Any) -> None:
    """Raise `WeightSyncError` for a communicator of vLLM whose broadcasts would do nothing.

    Where the NCCL library cannot be loaded, vLLM makes one all the same, and the receiver would
    serve uninitialised memory.
    """
    if group is None or group.disabled:
        raise WeightSyncError(
            "--weight-transport nccl needs the NCCL library in trainer and worker, and vLLM could "
            "not load it, or VLLM_DISABLE_PYNCCL is set: install requirements/gpu.txt in both, or "
            "use object_store"
        )
