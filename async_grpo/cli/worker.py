"""`worker_dispatcher.py`: starts workers on this node, keeps them, and takes them down with it.

A dispatcher of generation workers brings a verifier pool too. The first dispatcher, or trainer,
makes the controller, which outlives it as long as somebody uses it.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.options import CONTEXT, OptionsCommand, options_of
from async_grpo.cli.run_file import config_option
from async_grpo.config.roles import GENERATION
from async_grpo.config.worker_config import WorkerConfig, check_services
from async_grpo.launch import interrupts
from async_grpo.model.hub import local_folder
from async_grpo.model.model_folder import check_files, check_tokenizer_files, stated_positions
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, ConfigError, DataError, UnfitModel
from async_grpo.util.waiting import poll

if TYPE_CHECKING:
    from async_grpo.cluster.cluster import Cluster, Places

logger = logging.getLogger(__name__)
WATCH_INTERVAL_S = 0.5


@click.command("worker", cls=OptionsCommand, context_settings=CONTEXT)
@options_of(WorkerConfig)
@config_option
@click.option("--table", type=int, hidden=True, expose_value=False)  # which [[worker]], from 0
@interrupts.stdin_option
@command_boundary()
def main(**options: Any) -> None:
    """Start workers on this node and serve until Ctrl-C or the end of the Ray cluster.

    \b
    e.g. --model-path models/mine --num-workers 2 --reward-fns my_rewards.py:grade
    """
    config = WorkerConfig(**options)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would fill a log
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s")
    logging.getLogger("async_grpo").setLevel(config.logging_level)
    interrupts.interrupt_once()
    try:
        serve(config)
    except KeyboardInterrupt:  # how a dispatcher is meant to end
        click.echo("stopped")


def serve(config: WorkerConfig) -> None:
    """Serve until the cluster ends, and this process with it; raises what went wrong before."""
    check_services([config])
    if config.model_path and not config.judge_url:
        folder = local_folder(config.model_path, revision=config.model_revision)
        config = replace(config, model_path=folder)
        _check_model(config)
    from async_grpo.cluster.cluster import Cluster  # imports Ray, which --help need not

    serve_on(Cluster.join(config.ray_address, namespace=config.namespace), config)
    interrupts.leave(0)  # Ray would look for its head for 15 s


def serve_on(cluster: Cluster, config: WorkerConfig) -> None:
    """Serve until it ends; raises what went wrong before, unless its end explains it."""
    places = cluster.endpoints()
    try:
        _serve_on_cluster(config, cluster, places)
    except (ConfigError, DataError, UnfitModel):
        raise  # that no end of a cluster explains
    except AsyncGrpoError:
        if not _ends_soon(cluster, places):
            raise
    click.echo("the Ray cluster has ended, and the workers with it")


def _check_model(config: WorkerConfig) -> None:
    """What the folder's files show at once; a model that cannot be trained is the trainer's to say.

    Reading it as a whole would take this process the seconds in which its workers import the same.
    """
    folder = Path(config.model_path)
    check_files(folder)
    check_tokenizer_files(folder)
    stated = stated_positions(folder)
    if config.role == GENERATION and stated is not None and config.max_model_len > stated:
        raise ConfigError(
            f"--max-model-len must not exceed the {stated} positions of the model, got "
            f"{config.max_model_len}: lower it, or leave it out (docs/models.md on LongRoPE)"
        )


def _serve_on_cluster(config: WorkerConfig, cluster: Cluster, places: Places) -> None:
    from async_grpo.launch.actors import worker_kinds
    from async_grpo.launch.dispatcher import Workers

    kinds = worker_kinds(cluster, config)
    with Workers(kinds, config, cluster, say=click.echo) as workers:
        try:
            while not cluster.has_ended(places):
                workers.check()
                time.sleep(WATCH_INTERVAL_S)
        except KeyboardInterrupt:
            interrupts.interrupt_once()  # another one breaks this off
            workers.drain(timeout_s=config.drain_timeout_s)
            raise


def _ends_soon(cluster: Cluster, places: Places) -> bool:
    """Whether an error came from the cluster's end: it loses its workers before its head."""
    looks = poll(every_s=WATCH_INTERVAL_S, within_s=deadlines.HEAD_ENDED_S)
    return any(cluster.has_ended(places) for _ in looks)
