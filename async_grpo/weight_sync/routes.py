"""The dtype of published weights, and whether a transport reaches the workers. Pure.

A device is named by the identity that its driver gives it, which is the same in every process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from async_grpo.config.roles import role_of
from async_grpo.types import WorkerInfo
from async_grpo.util.errors import ConfigError, WeightSyncError

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

OBJECT_STORE = "object_store"


def published_dtype(workers: Iterable[WorkerInfo]) -> str:
    """The narrowest dtype that loses no precision for the workers that load the policy's weights.

    >>> from async_grpo.types import WorkerInfo
    >>> each = {
    ...     dtype: WorkerInfo("w", "generation", "n", 1, "m", 128, 8.0, 0.0, 512, dtype=dtype)
    ...     for dtype in ("bfloat16", "float16", "float32")
    ... }
    >>> published_dtype([each["bfloat16"]]), published_dtype([each["float16"]])
    ('bfloat16', 'float32')
    >>> published_dtype([each["bfloat16"], each["float32"]])
    'float32'
    """
    loading = (worker for worker in workers if role_of(worker.role).loads_weights)
    return "bfloat16" if {worker.dtype for worker in loading} == {"bfloat16"} else "float32"


def check_route(transport: str, worker: WorkerInfo, *, sender: str) -> None:
    """Raise `ConfigError` unless weights can travel from device `sender` to a worker's devices.

    `sender`: the device of trainer rank 0; empty: it has none. The object store needs none.

    >>> from async_grpo.types import WorkerInfo
    >>> worker = WorkerInfo("w", "generation", "n", 1, "m", 128, 8.0, 0.0, 512, devices=("GPU-1",))
    >>> check_route("nccl", worker, sender="GPU-0")
    >>> check_route("nccl", worker, sender="GPU-1")
    Traceback (most recent call last):
    async_grpo.util.errors.ConfigError: --weight-transport nccl needs a device of its own for \
every process, but trainer rank 0 and worker w share GPU-1: use object_store
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


def check_group(group: PyNcclCommunicator | None) -> None:
    """Raise `WeightSyncError` for a communicator of vLLM whose broadcasts would do nothing.

    vLLM makes one even where it cannot load the NCCL library; the receiver would then serve
    uninitialised memory.
    """
    if group is None or group.disabled:
        raise WeightSyncError(
            "--weight-transport nccl needs the NCCL library in trainer and worker, and vLLM could "
            "not load it, or VLLM_DISABLE_PYNCCL is set: install requirements/gpu.txt in both, or "
            f"use {OBJECT_STORE}"
        )
