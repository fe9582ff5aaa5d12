"""`async-grpo evaluate`: what a model gets right of a file of questions, and how sure that is."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.launch_file import cluster_of, dispatcher_of
from async_grpo.cli.local_run import LocalRun
from async_grpo.cli.options import CONTEXT, OptionsCommand, options_of
from async_grpo.cluster import cluster
from async_grpo.config.command_options import EvaluateConfig
from async_grpo.config.data_files import as_text
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.data.columns import Columns, parse_column_mapping
from async_grpo.data.lines import check_source
from async_grpo.devices.inventory import usable_devices
from async_grpo.environments.find import SHIPPED
from async_grpo.launch.child_processes import ChildProcess
from async_grpo.launch.interrupts import interrupt_once
from async_grpo.model.hub import local_folder
from async_grpo.model.model_folder import check_files, check_tokenizer_files
from async_grpo.types.roles import ENVIRONMENT, GENERATION
from async_grpo.util.together import in_background

POLL_INTERVAL_S = 0.2
OF_RUNS = ("set", "batch", "weights")  # what only lines of a run have


@click.command("evaluate", cls=OptionsCommand, context_settings=CONTEXT)
@click.argument("model")
@click.argument("data")
@options_of(EvaluateConfig)
@command_boundary()
def main(model: str, data: str, **options: Any) -> None:
    """Sample and grade the questions of DATA with MODEL, as a run evaluates its weights.

    DATA is what --eval-data-path takes. Workers and their Ray cluster are started here, and end
    with it. The same seed gives the same numbers, those that a run of these weights told.

    \b
    e.g. runs/mine/hf_format/samples_1000 held_out.jsonl --samples 8 --reward-fns countdown
    """
    config = EvaluateConfig(**options)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s")
    logging.getLogger("async_grpo").setLevel(config.logging_level)
    interrupt_once()
    folder = local_folder(model, revision=config.model_revision)
    check_files(Path(folder))
    check_tokenizer_files(Path(folder))
    mapping = parse_column_mapping(config.column_mapping)
    check_source(data, option="DATA", build=lambda row: Columns(row, mapping=mapping))
    measured = _measured(config, model=os.path.abspath(folder), data=data)
    _tell(measured, config)


def _measured(config: EvaluateConfig, *, model: str, data: str) -> dict[str, Any]:
    """What a line of a run says of the set; the logs stay where something fails."""
    folder = tempfile.mkdtemp(prefix="evaluate-")
    run = LocalRun(
        prepare=(),
        workers=_workers(config, model),
        train=_run(config, model, data, folder=folder),
        num_ranks=0,
        plot={},
        num_cpus=max(os.cpu_count() or 1, config.num_workers + 1),
        ray_address="",
        num_devices=len(usable_devices().devices),
    )
    run.logs.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        environment, _ = stack.enter_context(cluster_of(run))
        workers = [
            stack.enter_context(dispatcher_of(run, number, environment))
            for number in range(len(run.workers))
        ]
        os.environ.update(environment)  # before Ray is imported
        measured = _evaluated(run, config, data, workers)
    shutil.rmtree(folder, ignore_errors=True)
    return measured


def _workers(config: EvaluateConfig, model: str) -> tuple[WorkerConfig, ...]:
    """Who samples and grades."""
    engines = WorkerConfig(
        mode=GENERATION,
        model_path=model,
        reward_fns=config.reward_fns,
        reward_registry=config.reward_registry,
        verifier_timeout_s=config.verifier_timeout_s,
        unconfined_rewards=config.unconfined_rewards,
        unconfined_code=config.unconfined_code,
        dtype=config.dtype,
        num_workers=config.num_workers,
        tensor_parallel_size=config.tensor_parallel_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
    )
    is_played = config.environment not in SHIPPED
    players = WorkerConfig(mode=ENVIRONMENT, unconfined_code=config.unconfined_code)
    return (engines, players) if is_played else (engines,)


def _run(config: EvaluateConfig, model: str, data: str, *, folder: str) -> TrainConfig:
    """A run of one batch, which is over but for its last evaluation."""
    found = config.set_of(data)
    table = {
        "name": found.name, "path": data, "samples": found.samples, "top_p": found.top_p,
        "temperature": found.temperature, "max_tokens": found.max_tokens, "limit": found.limit,
        "seed": found.seed, "environment": found.environment, "split": config.data_split,
        "k": list(found.pass_ks), "config": config.data_config,
        "columns": config.columns,
    }  # fmt: skip
    given = {key: value for key, value in table.items() if value != ""}
    return TrainConfig(
        model_name_or_path=model,
        data_path=data,  # nothing of it is trained
        eval=as_text(given, option="eval", name="name"),
        output_dir=folder,
        num_training_batches=1,
        max_generation_tokens=config.max_generation_tokens,
        max_tokens_per_gpu=1 << 30,  # an episode may fill the model's positions
        column_mapping=config.column_mapping,
        renderer=config.renderer,
        stall_timeout_s=config.stall_timeout_s,
        dump_samples_filename="",
        trackers="",
    )


def _evaluated(
    run: LocalRun, config: EvaluateConfig, data: str, workers: Sequence[ChildProcess]
) -> dict[str, Any]:
    from async_grpo.run.evaluating import evaluate  # seconds, as all that needs torch
    from async_grpo.telemetry.evaluations import evaluation_row

    cluster.connect(run.train.ray_address, namespace=run.train.namespace)  # in the main thread
    outcome = in_background(lambda: evaluate(run.train), name="evaluate")
    while not outcome.done():
        for worker in workers:
            worker.check()
        time.sleep(POLL_INTERVAL_S)
    result = outcome.result()
    row = evaluation_row(replace(result, name=""), config.set_of(data), has_types=False)
    return {key: value for key, value in row.items() if key not in OF_RUNS}


def _tell(measured: dict[str, Any], config: EvaluateConfig) -> None:
    from async_grpo.telemetry.evaluations import in_words
    from async_grpo.telemetry.jsonl import write_json_atomic

    if config.output:
        write_json_atomic(Path(config.output), measured)
    click.echo(in_words(measured))
