"""Several gloo ranks on this machine, each in its own process, for tests of what is collective.

They are forked from a server that has imported what all of them need: importing takes 6 s of a
core, and a rank of a test does little else.
"""

from __future__ import annotations

import datetime
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = datetime.timedelta(seconds=60)
PRELOADED = (
    "hypothesis",
    "pytest",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
    "async_grpo.run.sampled_data",
    "async_grpo.training.learner",
)


def run_ranks(scenario: Callable[..., Any], *, num_ranks: int, folder: Path, **kwargs) -> list[Any]:
    """What `scenario(rank, **kwargs)` returned on every rank; it must be a module's function."""
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    arguments = scenario, num_ranks, str(folder), kwargs
    mp.start_processes(_rank, arguments, nprocs=num_ranks, start_method="forkserver")
    return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(num_ranks)]


def _rank(rank: int, scenario, num_ranks: int, folder: str, kwargs: dict) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    try:
        torch.save(scenario(rank, **kwargs), f"{folder}/rank{rank}")
        dist.barrier()
    finally:
        dist.destroy_process_group()
