"""`worker_dispatcher.py`: starts workers on this node, restarts lost ones, and ends them.

A dispatcher of generation workers brings a verifier pool too. The first dispatcher, or trainer,
makes the controller, which outlives it as long as another process uses it.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from async_grpo.checkpoint.merging import whole_folder
from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.options import CONTEXT, OptionsCommand, options_of
from async_grpo.cli.run_file import config_option
from async_grpo.config.roles import GENERATION, JUDGE, REWARD
from async_grpo.config.worker_config import WorkerConfig, check_services
from async_grpo.devices.inventory import usable_devices
from async_grpo.launch import interrupts
from async_grpo.model.foreign_folders import check_full_precision, check_sampled
from async_grpo.model.model_folder import (
    check_files,
    check_reward_model,
    check_tokenizer_files,
    stated_positions,
)
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
    except KeyboardInterrupt:  # the usual end of a dispatcher
        click.echo("stopped")


def serve(config: WorkerConfig) -> None:
    """Serve until the cluster ends, then exit this process; raise an error that comes before."""
    check_services([config])
    if config.num_devices and not config.judge_url:
        usable_devices()  # before a model is fetched for what this machine cannot use
    if config.model_path and not config.judge_url:
        folder = whole_folder(config.model_path, revision=config.model_revision)
        config = replace(config, model_path=folder)
        _check_model(config)
    from async_grpo.cluster.cluster import Cluster  # imports Ray, which --help need not

    serve_on(Cluster.join(config.ray_address, namespace=config.namespace), config)
    interrupts.leave(0)  # Ray would look for its head for 15 s


def serve_on(cluster: Cluster, config: WorkerConfig) -> None:
    """Serve until the cluster ends; raise an error unless the cluster's end explains it."""
    places = cluster.endpoints()
    try:
        _serve_on_cluster(config, cluster, places)
    except (ConfigError, DataError, UnfitModel):
        raise  # the end of a cluster causes none of these
    except AsyncGrpoError:
        # The end of a cluster loses its workers before its head.
        looks = poll(every_s=WATCH_INTERVAL_S, within_s=deadlines.HEAD_ENDED_S)
        if not any(cluster.has_ended(places) for _ in looks):
            raise
    click.echo("the Ray cluster has ended, and the workers with it")


def _check_model(config: WorkerConfig) -> None:
    """Check the folder's files; whether the model can be trained is checked by the trainer.

    Reading the whole model would take seconds that the workers spend on the same imports.
    """
    folder = Path(config.model_path)
    check_files(folder)
    check_tokenizer_files(folder)
    if config.mode == REWARD:
        check_reward_model(config.model_path)
    elif config.mode != JUDGE:
        check_full_precision(folder)
    if config.mode == GENERATION:
        check_sampled(folder)
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
            interrupts.interrupt_once()  # a second signal ends the drain
            workers.drain(timeout_s=config.drain_timeout_s)
            raise
