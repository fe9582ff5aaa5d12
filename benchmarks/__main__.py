"""Runs the benchmarks one after the other: `python -m benchmarks [NAME...]`, all by default."""

from __future__ import annotations

import subprocess
import sys

import click

from benchmarks import results
from benchmarks.catalogue import NAMES


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--quick", is_flag=True, help="small sizes, to show that all of it runs")
@click.option("--results-dir", help="where the figures go [default: benchmarks/results]")
def main(names: tuple[str, ...], quick: bool, results_dir: str | None) -> None:
    """Run benchmarks; those that fail are named at the end."""
    failed = []
    for name in names or NAMES:
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        command += ["--quick"] if quick else []
        command += ["--results-dir", results_dir] if results_dir else []
        click.echo(f"\n== {name}, {results.load()}")
        if subprocess.run(command).returncode:
            failed.append(name)
    if failed:
        raise click.ClickException(f"these benchmarks failed, see above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
