"""`trainer_core.py`: one trainer rank, usually started by torchrun."""

from __future__ import annotations

import logging
import os
import signal
from types import FrameType
from typing import Any

import click

from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.options import CONTEXT, options_of
from async_grpo.config.train import TrainConfig

GROUP_TIMEOUT_SLACK_S = 600.0


@click.command(context_settings=CONTEXT)
@options_of(TrainConfig)
@command_boundary()
def main(**options: Any) -> None:
    """Train a causal language model with GRPO (or SFT) on every rank that torchrun starts."""
    config = TrainConfig(**options)
    is_main = os.environ.get("RANK", "0") == "0"
    level = config.logging_level if is_main else "WARNING"
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    if is_main:
        signal.signal(signal.SIGTERM, _interrupt)  # so that everything is released, as on Ctrl-C
    run(config)


def run(config: TrainConfig) -> None:
    """Join the other ranks and train."""
    from async_grpo.training.ranks import Ranks

    timeout_s = config.stall_timeout_s + config.worker_timeout_s + GROUP_TIMEOUT_SLACK_S
    ranks = Ranks.start(timeout_s=timeout_s)
    try:
        if config.objective == "sft":
            from async_grpo.training.sft import train_sft

            train_sft(config, ranks)
        else:
            from async_grpo.training.loop import train_grpo

            train_grpo(config, ranks)
    finally:
        ranks.stop()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
