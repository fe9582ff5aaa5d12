"""A guard against getting slower: reruns benchmarks and compares their ratios with those on file.

Ratios alone are compared, because times are those of a machine: a share of a budget, one way's time
by another's within one run. A ratio is worse than on file when it is so by more than the slack and
lies outside the spread that the file saw.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks import results
from benchmarks.catalogue import GUARDED, NAMES
from benchmarks.results import RATIOS, Figure

SLACK = 0.15


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--slack", default=SLACK, help="share by which a ratio may be worse than on file")
def main(names: tuple[str, ...], slack: float) -> None:
    """Rerun benchmarks, all guarded ones by default; fails when a ratio has got worse."""
    complaints = []
    known = {name: results.read(name) for name in names or GUARDED}
    if unknown := [name for name, figures in known.items() if not figures]:
        raise click.ClickException(
            f"there is no file of {', '.join(unknown)} to compare with: write benchmarks/results/ "
            f'with `make benchmarks ARGS="{" ".join(unknown)}"`'
        )
    for name, on_file in known.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", f"benchmarks.{name}", "--results-dir", folder]
            subprocess.run(command, check=True)
            found = results.read(name, folder=Path(folder))
        complaints += [f"{name}: {text}" for text in worse(found, on_file, slack=slack)]
    if complaints:
        raise click.ClickException("\n".join(["these ratios got worse", *complaints]))
    click.echo("no ratio got worse")


def worse(found: Sequence[Figure], on_file: Sequence[Figure], *, slack: float) -> list[str]:
    """What is to be said of each ratio that got worse, or was not measured any more.

    >>> on_file = [Figure("packed / padded", 0.5, "x"), Figure("time", 1.0, "s")]
    >>> worse([Figure("packed / padded", 0.7, "x")], on_file, slack=0.1)
    ['packed / padded: 0.7, on file 0.5']
    """
    values = {figure.name: figure.value for figure in found}
    complaints = []
    for known in on_file:
        if known.unit not in RATIOS:
            continue
        value = values.get(known.name)
        if value is None:
            complaints.append(f"{known.name}: not measured, on file {known.value:g}")
        elif _is_worse(value, known, slack):
            complaints.append(f"{known.name}: {value:g}, on file {known.value:g}")
    return complaints


def _is_worse(value: float, known: Figure, slack: float) -> bool:
    low, high = known.spread or (known.value, known.value)
    if known.better == "higher":
        return value < min(low, known.value * (1 - slack))
    return value > max(high, known.value * (1 + slack))


if __name__ == "__main__":
    main()
