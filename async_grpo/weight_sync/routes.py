"""What is published, and whether it reaches the workers. Pure.

A device is named by the identity that its driver gives it, the same in every process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from async_grpo.config.roles import role_of
from async_grpo.types import WorkerInfo
from async_grpo.util.errors import ConfigError, WeightSyncError

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

OBJECT_STORE = "object_store"
GIB = 2**30
NUM_SNAPSHOTS = 2  # in the object store at a time: one is served while the next is stored


def published_dtype(workers: Iterable[WorkerInfo]) -> str:
    """The narrowest type that loses nothing to workers that follow the policy.

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


def store_complaint(model_bytes: int, *, store_bytes: int, share: float) -> str:
    """What is wrong with a node's object store that must hold a share of two snapshots, or "".

    >>> store_complaint(10 * GIB, store_bytes=20 * GIB, share=1.0)
    ''
    >>> print(store_complaint(10 * GIB, store_bytes=5 * GIB, share=0.5))
    this node's object store has 5.0 GiB and must hold 50% of 2 snapshots of 10.0 GiB of weights: \
they would go to a disk and back; start Ray with --object-store-memory 10737418240 or more, and a \
container with --shm-size 11g or more
    """
    needed = math.ceil(NUM_SNAPSHOTS * model_bytes * share)
    if needed <= store_bytes:
        return ""
    part = f"{share:.0%} of " if share < 1 else ""
    return (
        f"this node's object store has {store_bytes / GIB:.1f} GiB and must hold {part}"
        f"{NUM_SNAPSHOTS} snapshots of {model_bytes / GIB:.1f} GiB of weights: they would go to a "
        f"disk and back; start Ray with --object-store-memory {needed} or more, and a container "
        f"with --shm-size {math.ceil(needed * 1.05 / GIB)}g or more"
    )


def stored_here(*, num_ranks: int, num_here: int, shard_ranks: int | None) -> float:
    """The share of new weights that rank 0's machine stores, with so many of all ranks.

    `shard_ranks` of them hold a copy of the model together; 0: all; None: those of a machine. Of
    several copies the first is stored, which ranks from 0 on hold.

    >>> stored_here(num_ranks=16, num_here=8, shard_ranks=0)
    0.5
    >>> stored_here(num_ranks=16, num_here=8, shard_ranks=None)
    1.0
    >>> stored_here(num_ranks=16, num_here=4, shard_ranks=8)
    0.5
    """
    storing = num_here if shard_ranks is None else shard_ranks or num_ranks
    return min(num_here, storing) / storing


def check_route(transport: str, worker: WorkerInfo, *, sender: str) -> None:
    """Raise `ConfigError` unless weights can travel from device `sender` to a worker's devices.

    `sender` is that of trainer rank 0, empty when it has none. The object store leads everywhere.

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

    Where the NCCL library cannot be loaded, vLLM makes one all the same, and the receiver would
    serve uninitialised memory.
    """
    if group is None or group.disabled:
        raise WeightSyncError(
            "--weight-transport nccl needs the NCCL library in trainer and worker, and vLLM could "
            "not load it, or VLLM_DISABLE_PYNCCL is set: install requirements/gpu.txt in both, or "
            f"use {OBJECT_STORE}"
        )
