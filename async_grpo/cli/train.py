"""`async-grpo train`, `trainer_core.py`: all ranks of a machine, or one that torchrun starts."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import click

from async_grpo.cli import options
from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.run_file import config_option
from async_grpo.cluster import head
from async_grpo.cluster.reservation import rank_device
from async_grpo.config.option import flag, require
from async_grpo.config.train_config import TrainConfig
from async_grpo.devices.core_shares import (
    THREADS,
    num_cores,
    recorded_threads,
    thread_variables,
)
from async_grpo.devices.inventory import (
    VISIBLE,
    lacks_rdma,
    prepare_for_devices,
    usable_devices,
)
from async_grpo.launch import local_ranks
from async_grpo.launch.interrupts import RankInterrupts, stdin_option
from async_grpo.launch.local_ranks import is_main_rank, rank0_only_errors
from async_grpo.model.foreign_folders import is_adapter
from async_grpo.model.hub import check_push, local_folder
from async_grpo.model.model_folder import check_files, check_tokenizer_files
from async_grpo.run.output_folder import check_output, check_overwrite
from async_grpo.util import RELEASE, deadlines
from async_grpo.util.add_ons import add_on
from async_grpo.util.imports import without_collection
from async_grpo.util.stopping import StopRequest

if TYPE_CHECKING:
    from async_grpo.algorithms.base import Algorithm
    from async_grpo.training.ranks import Ranks

logger = logging.getLogger(__name__)
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers' too
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class RankCommand(options.OptionsCommand):
    """A command whose usage errors only rank 0 prints."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with rank0_only_errors():
            return super().parse_args(ctx, args)


@click.command("train", cls=RankCommand, context_settings=options.CONTEXT)
@options.options_of(TrainConfig)
@click.option(
    "--nproc-per-node",
    cls=options.GroupedOption,
    group="Memory and speed",
    type=click.IntRange(min=1),
    default=1,
    help="trainer ranks on this machine; on several machines torchrun starts them",
)
@options.predecessor_options
@config_option
@stdin_option
@command_boundary()
@rank0_only_errors()
def main(*, nproc_per_node: int, **_: object) -> None:
    """Train a causal language model with GRPO (or SFT) on this machine.

    On several machines: `torchrun ... trainer_core.py` on each of them, with the same options;
    `accelerate launch --use_fsdp ... trainer_core.py` does the same.

    \b
    e.g. --model-name-or-path models/mine --data-path questions.jsonl --output-dir runs/mine
    """
    context = click.get_current_context()
    config = config_of(context)
    check_overwrite(config.recording, is_typed=options.is_typed(context, "overwrite"))
    algorithm_of(config)
    several = nproc_per_node > 1 or local_ranks.TRAINER_NODE in os.environ
    if "RANK" not in os.environ and several:
        sys.exit(local_ranks.run_ranks(nproc_per_node))
    _check_started(nproc_per_node)
    _set_variables(config)
    # Progress is what this command puts out; errors go to stderr.
    logging.basicConfig(level="WARNING", handlers=[_log_handler()])
    stop = StopRequest()
    interrupts = RankInterrupts(stop, is_main=is_main_rank(), say=_say)
    interrupts.listen()
    local_ranks.end_with_agent()
    if is_main_rank():
        logging.getLogger("async_grpo").setLevel(config.recording.logging_level)
    else:
        logging.disable(logging.WARNING)
    if set_by := options.options_of_launcher(os.environ, options.given_options(context)):
        said = ", ".join(f"{flag(name)} {value}" for name, value in set_by.items())
        logger.info("accelerate sets what was not given: %s", said)
    with (
        local_ranks.ends_at_once(stop),
        command_boundary(),
        rank0_only_errors(),
        interrupts.on_interrupt(config.recording.output_dir),
    ):
        run(config, stop=stop)


def _set_variables(config: TrainConfig) -> None:
    """What libraries read when they are imported: quiet, devices, threads, interfaces."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    _take_from_accelerate(os.environ)
    prepare_for_devices(os.environ)
    recording, alone = config.recording, algorithm_of(config).learns_from_pairs
    recorded = recorded_threads(Path(recording.output_dir)) if recording.may_go_on else 0
    _share_cores(alone=alone, recorded=recorded)
    meets_workers = config.memory.weight_transport == "nccl" or bool(config.teaching.express)
    local_ranks.choose_interfaces(os.environ, meets_workers=meets_workers)


def _log_handler() -> logging.Handler:
    handler = logging.StreamHandler(sys.stdout)
    form = logging.Formatter
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        from async_grpo.telemetry.progress import TerminalFormatter as form  # with rich
    handler.setFormatter(form("%(asctime)s %(levelname)s %(message)s", "%m-%d %H:%M:%S"))
    return handler


def config_of(context: click.Context) -> TrainConfig:
    """The options of a command line, those of its `--config`, and those of its launcher."""
    given = options.given_options(context)
    given.pop("nproc_per_node", None)
    return TrainConfig.from_options(given | options.options_of_launcher(os.environ, given))


def _take_from_accelerate(environ: MutableMapping[str, str]) -> None:
    """Do what else accelerate's launcher asks for, and hide it from libraries.

    With ACCELERATE_USE_FSDP transformers loads whole models on rank 0 alone, for accelerate to send
    on; here each rank reads its own part.
    """
    environ.pop("ACCELERATE_USE_FSDP", None)
    if environ.get("ACCELERATE_USE_CPU", "").lower() == "true":
        environ[VISIBLE] = ""


def _share_cores(*, alone: bool, recorded: int = 0) -> None:
    """Set the variables for this rank's threads; not `alone`, half of the cores are workers'."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    processes, cores = ranks * (1 if alone else 2), num_cores()
    os.environ.update(
        thread_variables(os.environ, processes=processes, cores=cores, recorded=recorded)
    )


def algorithm_of(config: TrainConfig) -> Algorithm:
    """The algorithm of a run; raises `ConfigError` for options that it refuses."""
    from async_grpo.algorithms.find import find_algorithm  # imports numpy: not for --help

    return find_algorithm(config)


def check_at_once(config: TrainConfig) -> None:
    """Check paths, trackers and the cluster's address; the files' contents are checked at load."""
    check_output(config.recording)
    if config.recording.trackers:
        add_on("trackers").check_trackers(config.recording.trackers)
    if config.recording.push_to_hub:
        check_push(config.recording.push_to_hub)
    model = Path(config.places.model_name_or_path)
    check_files(model, needs_weights=not config.places.draws_weights)
    check_tokenizer_files(model)
    adapter = config.adapter
    if adapter.adapter_path and not is_adapter(Path(adapter.adapter_path)):
        rule = "must be the folder of an adapter in peft's format, or its name on a hub"
        raise adapter.refusal("adapter_path", rule, "correct it")
    from async_grpo.data.questions import check_sources  # imports numpy

    check_sources(config.data, config.evaluation, config.teaching)
    if not algorithm_of(config).learns_from_pairs:
        head.locate(config.places.ray_address)


def resolved(config: TrainConfig) -> TrainConfig:
    """The options with the folders of model and adapter, and an absolute path of a dump outside."""
    folder = local_folder(config.places.model_name_or_path, revision=config.places.model_revision)
    dump, adapter = config.recording.dump_samples_filename, config.adapter.adapter_path
    return config.but(
        model_name_or_path=folder,
        adapter_path=adapter and local_folder(adapter),
        dump_samples_filename=os.path.abspath(dump) if os.path.dirname(dump) else dump,
    )


def run(config: TrainConfig, *, stop: Event | None = None) -> None:
    """Join the other ranks and train."""
    if is_main_rank():
        logger.info("async-grpo %s: loading, to train in %s; %s thread(s) a rank on %d core(s)",
                    RELEASE, config.recording.output_dir, os.environ.get(THREADS, "all"),
                    num_cores())  # fmt: skip
        usable_devices()  # before a model is fetched for what this machine cannot use
    config = resolved(config)
    if is_main_rank():
        check_at_once(config)
    with without_collection():
        from async_grpo.training.ranks import as_ranks_failure  # seconds, as all needing torch

    places, asks_ray = config.places, not algorithm_of(config).learns_from_pairs
    timeout_s = places.stall_timeout_s + places.worker_timeout_s + _slack_s(config)
    try:
        with joined_ranks(config, asks_ray=asks_ray, timeout_s=timeout_s) as ranks:
            _train(config, ranks, stop=stop)
    except RuntimeError as error:
        if (failure := as_ranks_failure(error, config.recording.output_dir)) is None:
            raise
        raise failure from error


def _slack_s(config: TrainConfig) -> float:
    """How much longer than samples and workers the ranks wait for rank 0, in seconds.

    A publication, which it may wait for, has at most twice the bytes of the model's files.
    """
    files = Path(config.places.model_name_or_path).glob("*.safetensors")
    return deadlines.for_bytes(deadlines.GROUP_SLACK_S, 2 * sum(f.stat().st_size for f in files))


@contextmanager
def joined_ranks(config: TrainConfig, *, asks_ray: bool, timeout_s: float) -> Iterator[Ranks]:
    """The group of all ranks, which this one joins with a device of its own: see `rank_device`."""
    from async_grpo.training.ranks import COLLECTIVES_FILE, Ranks

    places, memory = config.places, config.memory
    # Where NCCL, whose time-out ends the process, leaves its record of collectives before.
    of_nccl = Path(config.recording.output_dir).absolute() / f"{COLLECTIVES_FILE}nccl_"
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(of_nccl))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    with rank_device(
        asks_ray=asks_ray and not memory.colocated,  # engines hold the ranks' devices in Ray
        address=places.ray_address,
        namespace=places.namespace,
        share=memory.gpus_per_rank,
    ) as device:
        sizes = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
        if device is not None and len({*sizes}) > 1 and (reason := lacks_rdma()):
            logger.warning("NCCL takes sockets between machines, ten times slower than RDMA, where "
                           "its network has no plugin: %s (docs/cluster.md)", reason)  # fmt: skip
        yield Ranks.start(
            timeout_s=timeout_s,
            device_index=device,
            memory_share=memory.gpus_per_rank,
            shard_ranks=memory.shard_ranks,
        )


@contextmanager
def ranks_alone(config: TrainConfig, num_ranks: int) -> Iterator[Ranks]:
    """The group of `num_ranks` ranks of this command, which need neither Ray nor workers.

    The others start here, or with torchrun on several machines; errors leave the process.
    """
    if "RANK" not in os.environ and num_ranks > 1:
        sys.exit(local_ranks.run_ranks(num_ranks))
    prepare_for_devices(os.environ)
    _share_cores(alone=True)
    local_ranks.choose_interfaces(os.environ)
    logging.basicConfig(level="WARNING", format="%(levelname)s: %(message)s")
    local_ranks.end_with_agent()
    if not is_main_rank():
        logging.disable(logging.WARNING)
    timeout_s = deadlines.GROUP_SLACK_S
    with (
        local_ranks.ends_at_once(),
        command_boundary(),
        rank0_only_errors(),
        joined_ranks(config, asks_ray=False, timeout_s=timeout_s) as ranks,
    ):
        yield ranks


def _check_started(num_ranks: int) -> None:
    """Raise `ConfigError` where torchrun started another number of ranks than was typed."""
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    rule = f"must be left to torchrun, which has started {num_here}"
    require(num_ranks in (1, num_here), "nproc_per_node", rule, num_ranks, "leave it out")


def _train(config: TrainConfig, ranks: Ranks, *, stop: Event | None) -> None:
    from async_grpo.run.output_folder import folder_held

    with folder_held(Path(config.recording.output_dir), ranks):
        with without_collection():
            from async_grpo.run.loop import train_grpo, train_sft
        from_pairs = algorithm_of(config).learns_from_pairs
        (train_sft if from_pairs else train_grpo)(config, ranks, stop=stop)
    if stop and stop.is_set():
        ranks.agree(0)  # wait for all: the launcher ends the others when one exits
    ranks.stop()


def _say(sentence: str) -> None:
    if is_main_rank():
        click.echo(sentence, err=True)
