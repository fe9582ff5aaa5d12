"""`trainer_core.py`: one trainer rank, usually started by torchrun."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import click

from async_grpo.cli import interrupts
from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.options import CONTEXT, given_options, options_of
from async_grpo.cli.torchrun import RankCommand, ends_at_once, is_main_rank, one_voice
from async_grpo.config.train import TrainConfig

GROUP_TIMEOUT_SLACK_S = 600.0
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers' too
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@click.command(cls=RankCommand, context_settings=CONTEXT)
@options_of(TrainConfig)
@command_boundary()
@one_voice()
def main(**options: Any) -> None:
    """Train a causal language model with GRPO (or SFT) on every rank that torchrun starts."""
    config = TrainConfig.from_options(given_options(options))
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    # Progress is what this command puts out; errors go to stderr.
    logging.basicConfig(
        level="WARNING", format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout
    )
    if is_main_rank():
        interrupts.interrupt_once()
        logging.getLogger("async_grpo").setLevel(config.logging_level)
    else:
        interrupts.end_at_once()
        logging.disable(logging.WARNING)
    with ends_at_once(), command_boundary(), one_voice():
        run(config)


def run(config: TrainConfig) -> None:
    """Join the other ranks and train."""
    from async_grpo.training.ranks import Ranks

    timeout_s = config.stall_timeout_s + config.worker_timeout_s + GROUP_TIMEOUT_SLACK_S
    ranks = Ranks.start(timeout_s=timeout_s)
    if config.objective == "sft":
        from async_grpo.training.sft import train_sft

        train_sft(config, ranks)
    else:
        from async_grpo.training.loop import train_grpo

        train_grpo(config, ranks)
    ranks.stop()
