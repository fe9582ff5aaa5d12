"""`async-grpo rollouts RUN`: what the model wrote, and how each token was weighed, as a page."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.options import CONTEXT
from async_grpo.util.errors import ConfigError

if TYPE_CHECKING:
    from async_grpo.viewing.page.build import Written

MIB = 2**20
MAX_SAMPLES, MAX_MIB = 100_000, 512.0


@click.command("rollouts", context_settings=CONTEXT)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("-o", "--output", default="", metavar="FILE", show_default="rollouts.html in RUN",
              help="page to write")  # fmt: skip
@click.option("--max-samples", type=click.IntRange(min=1), default=MAX_SAMPLES,
              help="samples in the page; of more, whole groups are left out evenly")  # fmt: skip
@click.option("--max-mib", type=click.FloatRange(0, min_open=True), default=MAX_MIB,
              help="lines of the dump that are read, in MiB; of more, as before")  # fmt: skip
@click.option("--tokenizer", default="", metavar="FOLDER", show_default="the run's model",
              help="tokenizer that makes text of token ids")  # fmt: skip
@command_boundary()
def main(run: Path, output: str, max_samples: int, max_mib: float, tokenizer: str) -> None:
    """Write one HTML page with the samples of RUN, the folder of a run or its dump.

    It opens from a file, needs no network and holds all of it: reward and length over time, filters
    and sorting, the turns of each episode. Of a run with --dump-token-columns it shows each token,
    by its advantage, its log-probability in trainer and engine, its version or its weight in the
    gradient, and how that came about.

    \b
    e.g. async-grpo rollouts runs/mine
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    path = Path(output) if output else (run if run.is_dir() else run.parent) / "rollouts.html"
    written = make_page(run, path, max_samples=max_samples, max_mib=max_mib, tokenizer=tokenizer)
    left_out = written.found.num_lines - written.num_broken - written.num_shown
    notes = [f"{written.num_shown} samples", f"{written.size_bytes / MIB:.1f} MiB"]
    notes += [f"{left_out} left out: see --max-samples and --max-mib"] * (left_out > 0)
    notes += [f"{written.num_broken} broken lines"] * (written.num_broken > 0)
    click.echo(f"wrote {path} ({', '.join(notes)})")


def make_page(
    run: Path,
    path: Path,
    *,
    max_samples: int = MAX_SAMPLES,
    max_mib: float = MAX_MIB,
    tokenizer: str = "",
) -> Written:
    """The command, with its defaults; raises `ConfigError` where `path` cannot be written."""
    from async_grpo.viewing.page.build import write_page  # with numpy

    def find(model: str) -> object:
        return _tokenizer(tokenizer, model=model, run=run)

    try:
        return write_page(run, path, max_samples=max_samples, max_mib=max_mib, find_tokenizer=find)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot write {path} ({reason}): choose another --output") from error


def _tokenizer(named: str, *, model: str, run: Path) -> object:
    """Hugging Face's: what the user named, or the run's model, or an export of the run; or None."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a page is made of what is here
    from async_grpo.environments.chat.find import find_tokenizer  # seconds

    exports = sorted((run / "hf_format").glob("samples_*"), reverse=True)
    for folder in (named,) if named else (model, *map(str, exports)):
        try:
            return find_tokenizer(folder)
        except (OSError, ValueError) as error:
            if named:
                raise ConfigError(f"--tokenizer {named} cannot be loaded: {error}") from error
    logging.getLogger(__name__).warning(
        "the tokenizer of %s cannot be loaded: tokens are shown as numbers (--tokenizer FOLDER "
        "names another)", model,
    )  # fmt: skip
    return None
