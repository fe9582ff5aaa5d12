"""What is done with a model that is there: `evaluate`, `generate`, `serve`, `dequantize`, `push`.

`evaluate` measures its accuracy on a file of questions, or its loss on one of texts, `generate`
writes its outputs as training pairs, `serve` answers OpenAI's protocol, `dequantize` writes
quantised weights out in bf16, `push` sends an export to a hub.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from async_grpo.checkpoint.merging import whole_folder
from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.local_run import LocalRun
from async_grpo.cli.options import CONTEXT, OptionsCommand, options_of
from async_grpo.cli.run_processes import cluster_of, dispatcher_of, name_of
from async_grpo.config.command_options import (
    EvaluateConfig,
    GenerateConfig,
    ServeConfig,
    worker_options,
)
from async_grpo.config.roles import ENVIRONMENT, GENERATION
from async_grpo.config.train_config import TrainConfig
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.data.lines import check_source
from async_grpo.data.questions import Columns, parse_column_mapping
from async_grpo.devices.bill import PACKED_BITS
from async_grpo.devices.inventory import usable_devices
from async_grpo.environments.find import SHIPPED
from async_grpo.launch.child_processes import ChildProcess
from async_grpo.launch.interrupts import interrupt_once
from async_grpo.model.foreign_folders import is_adapter
from async_grpo.model.hub import local_folder, push_folder
from async_grpo.model.model_folder import check_files, check_tokenizer_files
from async_grpo.util.run_folder import exports_in
from async_grpo.util.waiting import in_background

POLL_INTERVAL_S = 0.2
OF_RUNS = ("set", "batch", "weights")  # keys that only rows of a run have


@click.command("evaluate", cls=OptionsCommand, context_settings=CONTEXT)
@click.argument("model")
@click.argument("data")
@options_of(EvaluateConfig)
@command_boundary()
def evaluate(model: str, data: str, **options: Any) -> None:
    """Sample and grade the questions of DATA with MODEL, as a run evaluates its weights.

    DATA is what --eval-data-path takes. Workers and their Ray cluster are started here, and end
    with it. The same seed gives the same numbers, those that a run of these weights told.
    With --loss it needs none of them: DATA is what --algorithm sft trains.

    \b
    e.g. runs/mine/hf_format/samples_1000 held_out.jsonl --samples 8 --reward-fns countdown
    """
    config = EvaluateConfig(**options)
    folder = _begin(config, model)
    mapping = parse_column_mapping(config.column_mapping)
    check_source(data, option="DATA", build=lambda row: Columns(row, mapping=mapping))
    if config.loss:
        from async_grpo.run.evaluating import evaluate_loss  # seconds, as all that needs torch

        run = _loss_run(config, folder, data)
        loss = evaluate_loss(run, dtype=config.dtype, limit=config.limit)
        perplexity = math.exp(loss.mean)
        told = {"eval_loss": loss.mean, "perplexity": perplexity, **asdict(loss)}
        number = f"{loss.num_tokens:,} tokens of {loss.num_pairs:,} sequences"
        _tell(told, config, f"loss {loss.mean:.4f} a token, perplexity {perplexity:.4f}, {number}")
        return
    measured = _measured(config, model=os.path.abspath(folder), data=data)
    from async_grpo.telemetry.evaluation_record import in_words

    _tell(measured, config, in_words(measured))


def _loss_run(config: EvaluateConfig, model: str, data: str) -> TrainConfig:
    """Options of the supervised run that would train DATA."""
    return TrainConfig(
        model_name_or_path=model,
        data_path=data,
        algorithm="sft",
        block_size=config.block_size,
        data_split=config.data_split,
        data_config=config.data_config,
        column_mapping=config.column_mapping,
        columns=config.columns,
        max_tokens_per_gpu=1 << 30,  # a sequence may fill the model's positions
    )


def _measured(config: EvaluateConfig, *, model: str, data: str) -> dict[str, object]:
    """The row that a run writes of an evaluation; the folder with logs stays after a failure."""
    folder = tempfile.mkdtemp(prefix="evaluate-")
    run = LocalRun(
        prepare=(),
        workers=_workers(config, model),
        train=_run(config, model, data, folder=folder),
        num_ranks=0,
        num_cpus=max(os.cpu_count() or 1, config.num_workers + 1),
        ray_address="",
        num_devices=len(usable_devices().devices),
    )
    run.logs.mkdir(parents=True)
    run.write_file()
    with contextlib.ExitStack() as stack:
        environment, _ = stack.enter_context(cluster_of(run))
        workers = [
            stack.enter_context(dispatcher_of(run, number, environment, name=name_of(run, number)))
            for number in range(len(run.workers))
        ]
        os.environ.update(environment)  # before Ray is imported
        measured = _evaluated(run, config, data, workers)
    shutil.rmtree(folder, ignore_errors=True)
    return measured


def _workers(config: EvaluateConfig, model: str) -> tuple[WorkerConfig, ...]:
    """The workers that sample and grade."""
    engines = WorkerConfig(mode=GENERATION, model_path=model, **worker_options(config))
    is_played = config.environment not in SHIPPED
    players = WorkerConfig(mode=ENVIRONMENT, unconfined_code=config.unconfined_code)
    return (engines, players) if is_played else (engines,)


def _run(config: EvaluateConfig, model: str, data: str, *, folder: str) -> TrainConfig:
    """Options of a run of one batch, of which only the last evaluation is done."""
    return TrainConfig(
        model_name_or_path=model,
        data_path=data,  # nothing of it is trained
        eval=[config.set_of(data)],
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
) -> dict[str, object]:
    from async_grpo.cluster.cluster import Cluster
    from async_grpo.run import evaluating  # seconds, as all that needs torch
    from async_grpo.telemetry.evaluation_record import evaluation_row

    # In the main thread.
    places = run.train.places
    cluster = Cluster.join(places.ray_address, namespace=places.namespace)
    outcome = in_background(lambda: evaluating.evaluate(cluster, run.train), name="evaluate")
    while not outcome.done():
        for worker in workers:
            worker.check()
        time.sleep(POLL_INTERVAL_S)
    result = outcome.result()
    row = evaluation_row(replace(result, name=""), config.set_of(data), has_types=False)
    return {key: value for key, value in row.items() if key not in OF_RUNS}


def _tell(measured: dict[str, object], config: EvaluateConfig, sentence: str) -> None:
    from async_grpo.telemetry.jsonl import write_json_atomic

    if config.output:
        write_json_atomic(Path(config.output), measured)
    click.echo(sentence)


@click.command("generate", cls=OptionsCommand, context_settings=CONTEXT)
@options_of(GenerateConfig)
@command_boundary()
def generate(**options: Any) -> None:
    """Write a teacher's own outputs as pairs to train on.

    The pairs are the lines of the questions, each with an output as its completion. It needs
    neither Ray nor workers. --reward-fns leaves bad outputs out.

    \b
    e.g. --model-path models/large --data-path questions.jsonl --output pairs.jsonl
    """
    config = GenerateConfig(**options)
    config = replace(config, model_path=_begin(config, config.model_path))
    _check_at_once(config)
    from async_grpo.run.written_pairs import generate_pairs  # seconds, as all that needs torch

    count = generate_pairs(config, say=lambda sentence: click.echo(sentence, err=True))
    click.echo(f"wrote {config.output}: {count.in_words()}")


def _check_at_once(config: GenerateConfig) -> None:
    """Check the data and the output's place, before torch is imported."""
    mapping = parse_column_mapping(config.column_mapping)
    check_source(
        config.data_path, option="--data-path", build=lambda row: Columns(row, mapping=mapping)
    )
    folder = Path(config.output).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(config.output).is_dir():
        raise config.refusal(
            "output", "must be a file in a folder that can be written", "name another"
        )


@click.command("serve", cls=OptionsCommand, context_settings=CONTEXT)
@click.argument("model")
@options_of(ServeConfig)
@command_boundary()
def serve(model: str, **options: Any) -> None:
    """Serve MODEL, a folder or a name on a hub, to clients of OpenAI's protocol.

    Chats, completions and vLLM's token ids; a path /s/NAME keeps one conversation. It needs neither
    Ray nor workers. The token is that of ASYNC_GRPO_TOKEN, or is made and printed.

    \b
    e.g. runs/mine/hf_format/samples_1000 --port 8001
    """
    config = ServeConfig(**options)
    folder = _begin(config, model)
    from async_grpo.gateway import serving  # seconds, as all that needs torch

    serving.serve(folder, config, name=config.served_model_name or model, say=click.echo)


@click.command("dequantize", context_settings=CONTEXT)
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@command_boundary()
def dequantize(source: str, target: Path) -> None:
    """Write IN, a folder or a name on a hub of FP8 or MXFP4 weights, as the folder OUT in bf16.

    OUT is written once, whole or not at all; every role of a run then takes it. One tensor at a
    time is in memory.

    \b
    e.g. Qwen/Qwen3-8B-FP8 models/Qwen3-8B-bf16
    """
    folder = Path(local_folder(source))
    check_files(folder)
    from async_grpo.checkpoint import dequantize as bf16  # seconds, as all that needs torch

    num_weights = bf16.dequantize(folder, target)
    click.echo(f"wrote {target}: bf16, {num_weights} weights were quantised")


@click.command("quantize", context_settings=CONTEXT)
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--kind", type=click.Choice([*PACKED_BITS]), default="nf4", help="default: nf4")
@command_boundary()
def quantize(source: str, target: Path, kind: str) -> None:
    """Write IN with its linear layers rounded to 4 or 8 bits.

    Trainer ranks with --base-quantization hold such layers packed. OUT has IN's names and types,
    and every role of a run takes it: so engines compute with the ranks' weights. One tensor at a
    time is in memory. Needs bitsandbytes.

    \b
    e.g. Qwen/Qwen2.5-7B-Instruct models/Qwen2.5-7B-nf4
    """
    folder = Path(local_folder(source))
    check_files(folder)
    from async_grpo.checkpoint import dequantize as folders  # seconds, as all that needs torch

    num_weights = folders.quantize(folder, target, kind)
    click.echo(f"wrote {target}: {num_weights} weights are rounded to {kind}")


@click.command("push", context_settings=CONTEXT)
@click.argument("source", metavar="RUN_OR_FOLDER", type=click.Path(path_type=Path))
@click.argument("name")
@click.option("--hub-public", is_flag=True, help="show it to everybody")
@command_boundary()
def push(source: Path, name: str, *, hub_public: bool) -> None:
    """Send the last export of a run's folder, or one export, to the model NAME on a hub.

    It is sent in one commit. What --push-to-hub could not send is sent so. NAME is made private,
    unless --hub-public; HF_TOKEN must be allowed to write there.

    \b
    e.g. runs/mine my-team/my-model
    """
    _, folder = max(exports_in(source).items(), default=(0, source))
    if not is_adapter(folder):
        check_files(folder)
    click.echo(f"sent {folder}: {push_folder(folder, name, public=hub_public)}")


def _begin(config: EvaluateConfig | GenerateConfig | ServeConfig, model: str) -> str:
    """Set variables, logging and signals; return the model's folder, whose files are checked."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s")
    logging.getLogger("async_grpo").setLevel(config.logging_level)
    interrupt_once()
    folder = whole_folder(model, revision=config.model_revision)
    check_files(Path(folder))
    check_tokenizer_files(Path(folder))
    return folder
