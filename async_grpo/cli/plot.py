"""`plot.py plot PATH … -n NAME … -v VAR …`: the metrics of one or several runs as a picture."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from async_grpo.cli.boundary import command_boundary
from async_grpo.errors import ConfigError

if TYPE_CHECKING:
    from async_grpo.telemetry.curves import Run

REMOTE_HELP = "Read PATH on this host, over `ssh ALIAS`."


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Look at the metrics of runs: a PATH is a training_metrics.jsonl or the folder of a run."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")


@main.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@click.option("-n", "--name", "names", multiple=True, help="Name of each PATH, in order.")
@click.option(
    "-v",
    "--variable",
    "variables",
    multiple=True,
    help="What to plot; one panel each. [avg_reward]",
)
@click.option(
    "-x", "--x-variable", "--x_key", "x", default="step", show_default=True, help="Horizontal axis."
)
@click.option("-s", "--smooth", is_flag=True, help="Moving average, the raw curve faint behind.")
@click.option("--smooth-window", type=click.IntRange(min=1), default=10, show_default=True,
              help="Points of the moving average.")  # fmt: skip
@click.option("-o", "--output", default="metrics.svg", show_default=True, metavar="FILE",
              help="Picture to write: .svg, .png or .pdf.")  # fmt: skip
@click.option("--title", default="", help="Title of the picture.")
@click.option("-r", "--remote", default="", metavar="ALIAS", help=REMOTE_HELP)
@command_boundary()
def plot(
    paths: Sequence[str], names: Sequence[str], variables: Sequence[str], x: str, smooth: bool,
    smooth_window: int, output: str, title: str, remote: str,
) -> None:  # fmt: skip
    """Draw variables of one or several runs over each other.

    Runs of the same name are seeds of one experiment: their mean is drawn, in a band from the
    lowest to the highest.

    \b
    plot.py plot runs/a runs/b -n baseline -n ours -v avg_reward -v entropy -s -o compare.svg
    """
    from async_grpo.telemetry.curves import make_curves
    from async_grpo.telemetry.figure import check_output, save_figure

    check_output(output)
    runs = _read_runs(paths, names, remote)
    window = smooth_window if smooth else None
    panels = {
        variable: make_curves(runs, x=x, y=variable, smooth_window=window)
        for variable in dict.fromkeys(variables or ("avg_reward",))
    }
    save_figure(panels, output, x=x, title=title)
    click.echo(f"wrote {output}")


@main.command("list")
@click.argument("path")
@click.option("-r", "--remote", default="", metavar="ALIAS", help=REMOTE_HELP)
@command_boundary()
def list_variables(path: str, remote: str) -> None:
    """Print the variables of PATH and what they mean."""
    from async_grpo.telemetry.curves import read_run, variables
    from async_grpo.telemetry.schema import METRIC_BY_NAME

    names = variables(read_run(path, name=path, remote=remote).rows)
    width = max(map(len, names), default=0)
    for name in names:
        meaning = METRIC_BY_NAME[name].meaning if name in METRIC_BY_NAME else ""
        click.echo(f"{name:{width}}  {meaning}".rstrip())


main.add_command(list_variables, "info")  # as the predecessor calls it


def _read_runs(paths: Sequence[str], names: Sequence[str], remote: str) -> list[Run]:
    from async_grpo.telemetry.curves import read_run

    if names and len(names) != len(paths):
        raise ConfigError(
            f"-n must be given once for each PATH ({len(paths)}), got {len(names)}: "
            "repeat it, in the order of the paths, or leave it out"
        )
    names = names or default_names(paths)
    return [
        read_run(path, name=name, remote=remote) for path, name in zip(paths, names, strict=True)
    ]


def default_names(paths: Sequence[str]) -> list[str]:
    """The folders of the runs, or the whole paths where two folders are called the same.

    >>> default_names(["runs/a/training_metrics.jsonl", "runs/b"]), default_names(["1/x", "2/x"])
    (['a', 'b'], ['1/x', '2/x'])
    """
    files = [Path(path) for path in paths]
    names = [(file.parent if file.suffix == ".jsonl" else file).name for file in files]
    return names if len(set(names)) == len(names) and all(names) else list(paths)


if __name__ == "__main__":
    main(prog_name="plot.py")
