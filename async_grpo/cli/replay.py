"""`async-grpo replay RUN`: batches of a run trained again, to the bit."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.options import CONTEXT
from async_grpo.cluster.reservation import rank_device
from async_grpo.devices.inventory import prepare_for_devices
from async_grpo.launch.local_ranks import (
    end_with_agent,
    ends_at_once,
    is_main_rank,
    keep_to_loopback,
    rank0_only_errors,
    run_ranks,
)
from async_grpo.util import deadlines
from async_grpo.util.errors import ReplayError
from async_grpo.util.imports import without_collection

if TYPE_CHECKING:
    from async_grpo.run.replaying import Recorded


@click.command("replay", context_settings=CONTEXT)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--batch",
    type=click.IntRange(min=0),
    default=None,
    show_default="the last one",
    help="last batch that is trained again, as samples.jsonl counts: the first is 0",
)
@command_boundary()
@rank0_only_errors()
def main(run: Path, batch: int | None) -> None:
    """Train a batch of RUN, the folder of a run, again, and compare it to the bit.

    From the latest checkpoint before it, or from the model, every rank is given the minibatches
    that it had, in their order: each loss, gradient and update must be what it was. It says
    `equal`, or where the first difference is (exit code 1). As many ranks as the run had start
    here, or with torchrun on several machines. Neither Ray nor workers are needed, and nothing in
    RUN changes.

    \b
    e.g. async-grpo replay runs/mine --batch 12
    """
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ.setdefault(name, "1")  # what is here is what was trained
    with without_collection():
        from async_grpo.run.replaying import read_record  # seconds, as all needing torch

    record = read_record(run, batch=batch)
    if "RANK" not in os.environ and record.world_size > 1:
        sys.exit(run_ranks(record.world_size))
    prepare_for_devices(os.environ)
    keep_to_loopback(os.environ)
    logging.basicConfig(level="WARNING", format="%(levelname)s: %(message)s")
    end_with_agent()
    if not is_main_rank():
        logging.disable(logging.WARNING)
    with ends_at_once(), command_boundary(), rank0_only_errors():
        _replay(record, record.batches.stop - 1 if batch is None else batch)


def _replay(record: Recorded, batch: int) -> None:
    from async_grpo.run.replaying import check_ranks, find_checkpoint, machine_notes, replay
    from async_grpo.training.ranks import Ranks

    config = record.config
    with rank_device(
        asks_ray=False, address="", namespace="", share=config.memory.gpus_per_rank
    ) as device:
        ranks = Ranks.start(
            timeout_s=deadlines.GROUP_SLACK_S,
            device_index=device,
            memory_share=config.memory.gpus_per_rank,
            shard_ranks=config.memory.shard_ranks,
        )
        check_ranks(record, ranks)
        start = ranks.share(lambda: find_checkpoint(record, batch))
        _say(
            f"from {start.folder or config.places.model_name_or_path}, on {ranks.world_size} ranks"
        )
        for note in machine_notes(record, ranks):
            _say(f"note: {note}: bits may differ for that")
        difference = replay(record, batch, ranks, start=start, say=_say)
        if difference is not None:
            raise ReplayError(f"it differs first in {difference}")
        first = f"batches {start.batches} to {batch}" if start.batches < batch else f"batch {batch}"
        _say(f"equal: {first}, every loss, gradient and update, to the bit")
        ranks.stop()


def _say(sentence: str) -> None:
    if is_main_rank():
        click.echo(sentence)
