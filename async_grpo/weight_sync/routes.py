"""Whether a transport leads from the trainer's device to a worker. Pure.

A device is named by the identity that its driver gives it, the same in every process.
"""

from __future__ import annotations

from typing import Any

from async_grpo.errors import ConfigError, WeightSyncError
from async_grpo.types import WorkerInfo

OBJECT_STORE = "object_store"


def check_route(transport: str, worker: WorkerInfo, *, sender: str) -> None:
    """Raise `ConfigError` unless weights can travel from device `sender` to a worker's devices.

    `sender` is that of trainer rank 0, empty when it has none. The object store leads everywhere.

    >>> from async_grpo.types import WorkerInfo
    >>> worker = WorkerInfo("w", "generation", "n", 1, "m", 128, 8.0, 0.0, 512, devices=("GPU-1",))
    >>> check_route("nccl", worker, sender="GPU-0")
    >>> check_route("nccl", worker, sender="GPU-1")
    Traceback (most recent call last):
    async_grpo.errors.ConfigError: --weight-transport nccl needs a device of its own for every \
process, but trainer rank 0 and worker w share GPU-1: use object_store
    """
    if transport == OBJECT_STORE:
        return
    who = f"worker {worker.worker_id}"
    if not sender:
        need = "an NVIDIA device in trainer rank 0, which has none"
    elif not worker.devices:
        need = f"an NVIDIA device in every generation worker, {who} has none"
    elif sender in worker.devices:
        need = f"a device of its own for every process, but trainer rank 0 and {who} share {sender}"
    else:
        return
    raise ConfigError(f"--weight-transport {transport} needs {need}: use {OBJECT_STORE}")


def check_group(group: Any) -> None:
    """Raise `WeightSyncError` for a communicator of vLLM whose broadcasts would do nothing.

    Where the NCCL library cannot be loaded, vLLM makes one all the same, and the receiver would
    serve uninitialised memory.
    """
    if group is None or group.disabled:
        raise WeightSyncError(
            "--weight-transport nccl needs the NCCL library in trainer and worker, and vLLM could "
            "not load it, or VLLM_DISABLE_PYNCCL is set: install requirements/gpu.txt in both, or "
            f"use {OBJECT_STORE}"
        )
