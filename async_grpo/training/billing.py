"""From the options of a run to the inputs of a rank's memory bill (`devices.bill`). Pure."""

from __future__ import annotations

from async_grpo.algorithms.base import Algorithm
from async_grpo.config.training_options import MemoryOptions
from async_grpo.devices.bill import FLOAT32, Training

MOMENT_IN_8_BITS = 1 + FLOAT32 / 256  # bytes, with a float32 scale for 256 numbers
USED = 0.9  # fraction of the free memory that a bill may take; allocators and libraries need more


def as_billed(
    memory: MemoryOptions,
    algorithm: Algorithm,
    *,
    tokens: int,
    num_ranks: int,
    shard_ranks: int,
    number_bytes: int,
) -> Training:
    """The bill's inputs for a rank that trains minibatches of at most `tokens` tokens.

    `shard_ranks` of the `num_ranks` ranks share one copy of the model. `number_bytes`: bytes of one
    value in the compute dtype. `--activation-checkpointing auto` counts as off.
    """
    optim = algorithm.config.optimizer.optim
    return Training(
        shard_ranks=shard_ranks,
        moment_ranks=num_ranks if memory.fsdp_sharding_strategy == "ZERO1" else shard_ranks,
        num_tokens=tokens,
        chunk_tokens=memory.chunk_size(tokens),
        compute_bytes=number_bytes,
        keeps_gathered=memory.fsdp_sharding_strategy == "SHARD_GRAD_OP",
        checkpointing=int(memory.activation_checkpointing == "on"),
        defers=memory.defer_gradient_sync,
        keeps_old_policy=algorithm.uses_old_policy and algorithm.config.batching.steps_per_pass > 1,
        keeps_first_policy=algorithm.config.trainer_scores_reference,
        offload=memory.offload,
        moment_bytes=MOMENT_IN_8_BITS if optim.endswith("8bit") else FLOAT32,
        pages_moments=optim.startswith("paged"),
    )
