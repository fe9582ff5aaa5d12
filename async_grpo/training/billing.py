"""The bill of a trainer's rank, told before its policy has memory, and what follows from it."""

from __future__ import annotations

import logging
from dataclasses import replace

from async_grpo.config.train import TrainConfig
from async_grpo.devices.bill import GIB, Training, trainer_bill, with_checkpointing_if_needed
from async_grpo.devices.memory import free_bytes
from async_grpo.model.policy import PolicyModel
from async_grpo.model.size import model_shape
from async_grpo.training.as_billed import USED, as_billed
from async_grpo.training.fsdp import compute_dtype, shard
from async_grpo.training.ranks import Ranks

logger = logging.getLogger(__name__)


def training_of(config: TrainConfig, ranks: Ranks) -> Training:
    """How the options have this rank train, as the bill knows it; `auto` counts as off."""
    dtype = compute_dtype(config.mixed_precision, ranks.device)
    return as_billed(config, shard_ranks=ranks.mesh.size(-1), compute_bytes=dtype.itemsize)


def shard_as_billed(policy: PolicyModel, config: TrainConfig, ranks: Ranks) -> None:
    """Shard an outlined policy as the options say, and log what it will take; collective.

    `--activation-checkpointing auto` is decided here, for all ranks by the one with the least room.
    """
    model, training = model_shape(policy), training_of(config, ranks)
    free = free_bytes(ranks.device, share=config.gpus_per_rank)
    if config.activation_checkpointing == "auto":
        wanted = with_checkpointing_if_needed(model, training, free_bytes=int(USED * free))
        training = replace(training, checkpointing=bool(ranks.agree(wanted.checkpointing)))
    bill = trainer_bill(model, training)
    logger.info(
        "%s\nof %.1f GiB that are free; activation checkpointing (%s) is %s",
        bill.in_words(), free / GIB, config.activation_checkpointing,
        "on" if training.checkpointing else "off",
    )  # fmt: skip
    if bill.total > free:
        logger.warning(
            "a trainer rank needs about %.1f GiB with minibatches of --max-tokens-per-gpu %d, and "
            "%.1f GiB are free: lower it, train on more ranks, or give --offload",
            bill.total / GIB, training.num_tokens, free / GIB,
        )  # fmt: skip
    shard(
        policy,
        ranks.mesh,
        mixed_precision=config.mixed_precision,
        keep_gathered=training.keeps_gathered,
        offload=config.offload == "parameters",
        activation_checkpointing=training.checkpointing,
        compile=config.use_torch_compile,
    )
