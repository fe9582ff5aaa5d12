"""Several gloo ranks on this machine, each in its own process, for tests of what is collective."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = datetime.timedelta(seconds=60)


def run_ranks(scenario: Callable[..., Any], *, num_ranks: int, folder: Path, **kwargs) -> list[Any]:
    """What `scenario(rank, **kwargs)` returned on every rank; it must be a module's function."""
    mp.spawn(_rank, args=(scenario, num_ranks, str(folder), kwargs), nprocs=num_ranks)
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
