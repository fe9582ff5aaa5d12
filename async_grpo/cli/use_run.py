"""What is done with a run that is there: `plot`, `rollouts` and `replay`.

A picture of its metrics; a page of what the model wrote, and of how each token was weighed; its
batches trained again, and compared to the bit.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from async_grpo.cli.boundary import command_boundary
from async_grpo.cli.options import CONTEXT, OptionsCommand
from async_grpo.cli.run_file import config_option
from async_grpo.cli.train import ranks_alone
from async_grpo.launch import local_ranks
from async_grpo.util.errors import ConfigError, ReplayError
from async_grpo.util.imports import without_collection

if TYPE_CHECKING:
    from async_grpo.run.replaying import Recorded
    from async_grpo.training.ranks import Ranks
    from async_grpo.viewing.curves import Run
    from async_grpo.viewing.page.build import Written

MANY = 60  # points, whose noise hides a curve
REMOTE_HELP = "Read PATH on this host, over `ssh ALIAS`."
MIB = 2**20
MAX_SAMPLES, MAX_MIB = 100_000, 512.0


class PlotGroup(click.Group):
    """Passes arguments to `plot` if the first names no command: `async-grpo plot runs/a`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["plot", *args]
        return super().parse_args(ctx, args)


@click.group("plot", cls=PlotGroup, context_settings={"help_option_names": ["-h", "--help"]})
def plot_commands() -> None:
    """Look at the metrics of runs: a PATH is a training_metrics.jsonl or the folder of a run.

    The command `plot` may be left out.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")


@plot_commands.command(cls=OptionsCommand)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option(
    "-n",
    "--name",
    "names",
    multiple=True,
    help="Name of each PATH, in order. [its folder, and one name for all seeds of a run]",
)
@click.option(
    "-v",
    "--variable",
    "variables",
    multiple=True,
    help="What to plot; one panel each, also of the evaluations (eval_...). [those of reward, "
    "held-out accuracy, length, entropy, gradient and mismatch that all runs have]",
)
@click.option("-x", "--x-variable", "--x_key", "x", default="step", show_default=True,
              help="Horizontal axis: a variable, or seconds, minutes or hours run.")  # fmt: skip
@click.option("-s", "--smooth/--no-smooth", default=None, show_default=f"above {MANY} steps",
              help="Moving average, the raw curve faint behind.")  # fmt: skip
@click.option("--smooth-window", type=click.IntRange(min=1), default=10, show_default=True,
              help="Points of the moving average.")  # fmt: skip
@click.option("-o", "--output", default="metrics.svg", show_default=True, metavar="FILE",
              help="Picture to write: .svg, .png or .pdf.")  # fmt: skip
@click.option("--title", default="", help="Title of the picture.")
@click.option("-r", "--remote", default="", metavar="ALIAS", help=REMOTE_HELP)
@config_option
@command_boundary()
def plot(
    paths: Sequence[str], names: Sequence[str], variables: Sequence[str], x: str,
    smooth: bool | None, smooth_window: int, output: str, title: str, remote: str,
) -> None:  # fmt: skip
    """Draw variables of one or several runs over each other.

    Runs that differ by their seed alone, and runs that `-n` gives one name, are one experiment:
    their mean is drawn, in a band from the lowest to the highest.

    \b
    plot.py plot runs/a runs/b -n baseline -n ours -v avg_reward -v entropy -s -o compare.svg
    """
    from async_grpo.viewing.curves import NotMeasuredError, chosen_variables, make_curves
    from async_grpo.viewing.figure import check_output, save_figure

    check_output(output)
    runs = _read_runs(paths, names, remote)
    if smooth is None:
        smooth = max(len(run.rows) for run in runs) > MANY
    window = smooth_window if smooth else None
    panels, wanted = {}, tuple(dict.fromkeys(variables or chosen_variables(runs)))
    for variable in wanted:
        try:
            panels[variable] = make_curves(runs, x=x, y=variable, smooth_window=window)
        except NotMeasuredError as error:  # one of several leaves the others their picture
            if variable == wanted[-1] and not panels:
                raise
            click.echo(f"left out: {error}", err=True)
    save_figure(panels, output, x=x, title=title)
    click.echo(f"wrote {output}")


@plot_commands.command("list")
@click.argument("path")
@click.option("-r", "--remote", default="", metavar="ALIAS", help=REMOTE_HELP)
@command_boundary()
def list_variables(path: str, remote: str) -> None:
    """Print the variables of PATH: first, last, lowest and highest value, and what they mean."""
    from async_grpo.telemetry.progress import number
    from async_grpo.telemetry.schema import METRIC_BY_NAME
    from async_grpo.viewing.curves import read_run, values

    lines: list[tuple[str, ...]] = [("", "first", "last", "lowest", "highest", "")]
    for name, seen in values(read_run(path, name=path, remote=remote)).items():
        meaning = METRIC_BY_NAME[name].meaning if name in METRIC_BY_NAME else ""
        shown = map(number, (seen[0], seen[-1], min(seen), max(seen)))
        lines.append((name, *shown, meaning))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for name, *figures, meaning in lines:
        columns = [name.ljust(widths[0]), *map(str.rjust, figures, widths[1:])]
        click.echo("  ".join([*columns, meaning]).rstrip())


plot_commands.add_command(list_variables, "info")  # as the predecessor calls it


def _read_runs(paths: Sequence[str], names: Sequence[str], remote: str) -> list[Run]:
    from async_grpo.viewing.curves import default_names, names_of, read_run

    if names and len(names) != len(paths):
        raise ConfigError(
            f"-n must be given once for each PATH ({len(paths)}), got {len(names)}: "
            "repeat it, in the order of the paths, or leave it out"
        )
    given = names or default_names(paths)
    runs = [
        read_run(path, name=name, remote=remote) for path, name in zip(paths, given, strict=True)
    ]
    if not names:
        found = names_of(paths, [run.options for run in runs])
        runs = [replace(run, name=name) for run, name in zip(runs, found, strict=True)]
    return runs


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
@click.option("--follow", is_flag=True,
              help="serve the page here, with what the run writes meanwhile")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default="any that is free",
              help="port of --follow")  # fmt: skip
@click.option("--print", "num_printed", type=click.IntRange(min=1), default=None,
              help="print so many of the newest samples as a table, and write no page")  # fmt: skip
@command_boundary()
def rollouts(
    run: Path, output: str, max_samples: int, max_mib: float, tokenizer: str, follow: bool,
    port: int, num_printed: int | None,
) -> None:  # fmt: skip
    """Write one HTML page with the samples of RUN, the folder of a run or its dump.

    It opens from a file, needs no network and holds all of it: reward and length over time, each
    question's solve rate, search, filters and sorting, the turns of each episode, held-out
    answers. Of a run with --dump-token-columns it shows each token, by its advantage, its
    log-probability in trainer and engine, its version or its weight in the gradient, and how that
    came about.

    \b
    e.g. async-grpo rollouts runs/mine --follow
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if num_printed:
        _print_newest(run, num_printed)
        return
    if follow:
        if output:
            raise ConfigError("--output must be left out with --follow, which writes no file")
        serve_page(run, port, max_samples=max_samples, max_mib=max_mib, tokenizer=tokenizer)
        return
    path = Path(output) if output else (run if run.is_dir() else run.parent) / "rollouts.html"
    written = make_page(run, path, max_samples=max_samples, max_mib=max_mib, tokenizer=tokenizer)
    left_out = written.found.num_lines - written.num_broken - written.num_shown
    notes = [f"{written.num_shown} samples", f"{written.size_bytes / MIB:.1f} MiB"]
    notes += [f"{left_out} left out: see --max-samples and --max-mib"] * (left_out > 0)
    notes += [f"{written.num_broken} broken lines"] * (written.num_broken > 0)
    click.echo(f"wrote {path} ({', '.join(notes)})")


def _print_newest(run: Path, number: int) -> None:
    """Print the newest samples of a run as a table, the newest last."""
    import rich
    from rich.table import Table
    from rich.text import Text

    from async_grpo.telemetry.progress import number as in_digits
    from async_grpo.viewing.page.dump import Dump

    table = Table(show_lines=True)
    for head in ("batch", "reward", "tokens", "ended by"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("question", ratio=1)
    table.add_column("output", ratio=2)
    for line in Dump(run).newest(number):
        shown = (line["batch"], in_digits(line.get("reward")), line.get("num_output_tokens"))
        ended = "given" if line.get("given") else line.get("finish_reason")
        texts = (ended, _shortened(line["input"]), _shortened(line["output"]))
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in (*shown, *texts)))
    rich.print(table)


def _shortened(text: str, longest: int = 400) -> str:
    """Beginning and end of a text, without what a terminal would obey."""
    text = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"


def make_page(
    run: Path,
    path: Path,
    *,
    max_samples: int = MAX_SAMPLES,
    max_mib: float = MAX_MIB,
    tokenizer: str = "",
) -> Written:
    """Write the page of `rollouts`; raises `ConfigError` where `path` cannot be written."""
    from async_grpo.viewing.page.build import write_page  # with numpy

    find = partial(_tokenizer, named=tokenizer, run=run)
    try:
        return write_page(run, path, max_samples=max_samples, max_mib=max_mib, find_tokenizer=find)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot write {path} ({reason}): choose another --output") from error


def serve_page(run: Path, port: int, *, max_samples: int, max_mib: float, tokenizer: str) -> None:
    """Serve the page of a run that goes on until Ctrl-C; raises `ConfigError` for a taken port."""
    from async_grpo.viewing.page.follow import Followed, PageServer

    if not run.exists():
        raise ConfigError(
            f"RUN must be the folder of a run, or its dump, got {run}: it is not there"
        )
    find = partial(_tokenizer, named=tokenizer, run=run)
    max_bytes = max_mib * MIB
    followed = Followed(run, max_samples=max_samples, max_bytes=max_bytes, find_tokenizer=find)
    try:
        server = PageServer(followed, port=port)
    except OSError as error:
        raise ConfigError(
            f"--port {port} must be free, got {error.strerror}: leave it out"
        ) from error
    with server, contextlib.suppress(KeyboardInterrupt):
        click.echo(f"{server.address} follows {run}: open it in a browser; Ctrl-C ends it")
        server.serve_forever()


def _tokenizer(model: str, *, named: str, run: Path) -> object:
    """The tokenizer that the user named, or of the run's model or an export, or None."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded for a page
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
@local_ranks.rank0_only_errors()
def replay(run: Path, batch: int | None) -> None:
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
    with ranks_alone(record.config, record.world_size) as ranks:
        _replay(record, record.batches.stop - 1 if batch is None else batch, ranks)


def _replay(record: Recorded, batch: int, ranks: Ranks) -> None:
    from async_grpo.run import replaying

    replaying.check_ranks(record, ranks)
    start = ranks.share(lambda: replaying.find_checkpoint(record, batch))
    model = record.config.places.model_name_or_path
    _say(f"from {start.folder or model}, on {ranks.world_size} ranks")
    for note in replaying.machine_notes(record, ranks):
        _say(f"note: {note}: bits may differ for that")
    difference = replaying.replay(record, batch, ranks, start=start, say=_say)
    if difference is not None:
        raise ReplayError(f"it differs first in {difference}")
    first = f"batches {start.batches} to {batch}" if start.batches < batch else f"batch {batch}"
    _say(f"equal: {first}, every loss, gradient and update, to the bit")
    ranks.stop()


def _say(sentence: str) -> None:
    if local_ranks.is_main_rank():
        click.echo(sentence)


if __name__ == "__main__":
    plot_commands(prog_name="plot.py")
