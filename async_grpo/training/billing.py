"""From the options of a run to the inputs of a rank's memory bill (`devices.bill`). Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from async_grpo.algorithms.base import Algorithm
from async_grpo.config.training_options import MemoryOptions
from async_grpo.devices.bill import FLOAT32, GIB, ModelShape, Training, trainer_bill
from async_grpo.util.errors import ConfigError

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
        saves=algorithm.config.recording.checkpoint_every_batches > 0,
        payload=next((n.payload.kind for n in algorithm.needs if n.payload), ""),
    )


def too_large(
    model: ModelShape, training: Training, *, free_bytes: int, host_bytes: int
) -> ConfigError:
    """The error for a rank whose bill exceeds what it has, with the changes that are enough."""

    def fits(**changed: Any) -> bool:
        bill = trainer_bill(model, replace(training, **changed))
        return bill.total <= free_bytes and bill.on_host <= host_bytes

    tokens, ranks = training.num_tokens, training.shard_ranks
    fewer = (tokens >> power for power in range(1, tokens.bit_length()))
    more = (ranks << power for power in range(1, 8))
    lower = next((n for n in fewer if fits(num_tokens=n)), 0)
    enough = next((n for n in more if fits(shard_ranks=n, moment_ranks=n)), 0)
    offload = next((each for each in ("optimizer", "parameters") if fits(offload=each)), "")
    found = [f"lower --max-tokens-per-gpu to {lower}"] if lower else []
    found += [f"shard the model over {enough} ranks (FULL_SHARD)"] if enough else []
    found += [f"give --offload {offload}"] if offload else []
    found += ["train an adapter (--lora-rank 16)"] if model.trained is None else []
    bill = trainer_bill(model, training)
    return ConfigError(
        f"a trainer rank needs about {bill.total / GIB:.1f} GiB where it computes and "
        f"{bill.on_host / GIB:.1f} of its host beside, with minibatches of --max-tokens-per-gpu "
        f"{tokens}, and has {free_bytes / GIB:.1f} and {host_bytes / GIB:.1f} GiB: "
        f"{', or '.join(found)}; --unchecked-memory starts it all the same"
    )
