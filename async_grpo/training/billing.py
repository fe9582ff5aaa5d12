"""The options of a run as the bill of a rank's memory knows them. Pure."""

from __future__ import annotations

from async_grpo.algorithms.base import Algorithm
from async_grpo.config.training_options import MemoryOptions
from async_grpo.devices.bill import Training

USED = 0.9  # of the free memory: the rest is for allocators and libraries


def as_billed(
    memory: MemoryOptions, algorithm: Algorithm, *, tokens: int, shard_ranks: int, number_bytes: int
) -> Training:
    """How the options have a rank train minibatches of at most so many tokens.

    `number_bytes`: of a number of the compute type. `--activation-checkpointing auto` counts as
    off.
    """
    return Training(
        shard_ranks=shard_ranks,
        num_tokens=tokens,
        chunk_tokens=memory.chunk_size(tokens),
        compute_bytes=number_bytes,
        keeps_gathered=memory.fsdp_sharding_strategy == "SHARD_GRAD_OP",
        checkpointing=memory.activation_checkpointing == "on",
        defers=memory.defer_gradient_sync,
        keeps_old_policy=algorithm.uses_old_policy,
        offload=memory.offload,
    )
