"""`async-grpo quickstart`: launches examples/quickstart.toml, from questions to a better model."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.launch_file import launch, run_here
from async_grpo.cli.local_run import options_of_run, planned
from async_grpo.cli.options import CONTEXT
from async_grpo.errors import ConfigError

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
    if folder.exists() and not (folder / "logs").is_dir():
        raise ConfigError(
            f"--output-dir {folder} exists and is not a quick start's: name another folder"
        )
    train_options = (
        *(f"--data-path={questions}", f"--eval-data-path={held_out}"),
        *(f"--output-dir={folder}", f"--num-training-batches={num_batches}"),
        *(f"--nproc-per-node={num_ranks}", f"--max-staleness={max_staleness}"),
        f"--infinite-sampler-seed={seed}",
    )
    prepare_options = (f"--seed={seed}", f"--output={questions}", f"--held-out-output={held_out}")
    options = launch.make_context("launch", [config, *train_options]).params
    options["prepare"] = f"{options['prepare']} {shlex.join(prepare_options)}"
    run_here(planned(**options_of_run(options)))
