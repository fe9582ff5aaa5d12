"""The options of a run as the bill of a rank's memory knows them. Pure."""

from __future__ import annotations

from async_grpo.algorithms.find import find_algorithm
from async_grpo.config.train_config import TrainConfig
from async_grpo.devices.bill import Training

USED = 0.9  # of the free memory: the rest is for allocators and libraries


def as_billed(config: TrainConfig, *, shard_ranks: int, compute_bytes: int) -> Training:
    """How the options have a rank train; `--activation-checkpointing auto` counts as off."""
    return Training(
        shard_ranks=shard_ranks,
        num_tokens=config.batching.max_tokens_per_gpu,
        chunk_tokens=config.chunk_size,
        compute_bytes=compute_bytes,
        keeps_gathered=config.memory.fsdp_sharding_strategy == "SHARD_GRAD_OP",
        checkpointing=config.memory.activation_checkpointing == "on",
        defers=config.memory.defer_gradient_sync,
        keeps_old_policy=find_algorithm(config).uses_old_policy,
        offload=config.memory.offload,
    )
