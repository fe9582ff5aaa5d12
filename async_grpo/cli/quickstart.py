"""`async-grpo quickstart`: launches examples/quickstart.toml, from questions to a better model."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.launch_file import launch, run_here
from async_grpo.cli.local_run import LocalRun, options_of_run, planned
from async_grpo.cli.options import CONTEXT
from async_grpo.cli.train import resolved
from async_grpo.util.errors import ConfigError
from async_grpo.util.run_folder import PARAMETERS_FILE

FILE = "examples/quickstart.toml"


@click.command(context_settings=CONTEXT)
@click.option("--config", default=FILE, metavar="FILE", help="file of the run")
@click.option("--output-dir", default="runs/quickstart", help="folder of the run; replaced")
@click.option("--num-batches", default=90, help="batches to train")
@click.option("--seed", default=0, help="seed of the questions and of their order")
@click.option("--num-ranks", default=2, help="trainer ranks; fewer where devices are few")
@click.option("--max-staleness", default=1, help="batches that generation may run ahead")
@command_boundary()
def quickstart(
    *, config: str, output_dir: str, num_batches: int, seed: int, num_ranks: int, max_staleness: int
) -> None:
    """Train a tiny model on countdown puzzles, here and now.

    \b
    e.g. --num-batches 40 --output-dir runs/first
    """
    folder = Path(output_dir)
    questions, held_out = folder / "questions.jsonl", folder / "held_out.jsonl"
    train_options = (
        "--overwrite",
        *(f"--data-path={questions}", f"--eval-data-path={held_out}"),
        *(f"--output-dir={folder}", f"--num-training-batches={num_batches}"),
        *(f"--nproc-per-node={num_ranks}", f"--max-staleness={max_staleness}"),
        f"--infinite-sampler-seed={seed}",
    )
    prepare_options = (f"--seed={seed}", f"--output={questions}", f"--held-out-output={held_out}")
    options = launch.make_context("launch", [config, *train_options]).params
    options["prepare"] = f"{options['prepare']} {shlex.join(prepare_options)}"
    run = planned(**options_of_run(options))
    if folder.exists() and not _is_own(run):
        raise ConfigError(
            f"--output-dir {folder} exists and is not a quick start's: name another folder"
        )
    run_here(run)


def _is_own(run: LocalRun) -> bool:
    """Whether a quick start has made the run's folder: its options differ in nothing else."""
    from async_grpo.checkpoint.resume import INCIDENTAL, differing_options  # not for --help

    if not (run.folder / PARAMETERS_FILE).exists():  # it ended before it was one
        return run.logs.is_dir()
    own = ("num_training_batches", "infinite_sampler_seed", "max_staleness")
    return not differing_options(resolved(run.train), run.folder, (*INCIDENTAL, *own))
