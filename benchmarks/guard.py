"""A guard against getting slower: reruns benchmarks and compares their ratios with those on file.

First it looks for the files of all benchmarks, and whether they are of one commit. Ratios alone are
compared, because times are those of a machine: a share of a budget, one way's time
by another's within one run. A ratio is worse than on file when it is so by more than the slack and
lies outside the spread that the file saw.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from benchmarks import results
from benchmarks.catalogue import FILES, GUARDED, NAMES
from benchmarks.results import RATIOS, Figure

SLACK = 0.15


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--slack", default=SLACK, help="share by which a ratio may be worse than on file")
@click.option("--results-dir", default=str(results.FOLDER), help="where the files are")
def main(names: tuple[str, ...], slack: float, results_dir: str) -> None:
    """Rerun benchmarks, all guarded ones by default; fails when a ratio has got worse.

    Fails too when a benchmark has no file, whether it is rerun or not.
    """
    complaints, on_file = [], Path(results_dir)
    commits = {
        name: results.measured_at(*FILES.get(name, (name,)), folder=on_file)
        for name in names or NAMES
    }
    if missing := [name for name, commit in commits.items() if not commit]:
        raise click.ClickException(
            f"there is no file of {', '.join(missing)} to compare with: write benchmarks/results/ "
            f'with `make benchmarks ARGS="{" ".join(missing)}"`'
        )
    if len(by_commit := _by_commit(commits)) > 1:
        told = ", ".join(f"{commit} ({', '.join(own)})" for commit, own in by_commit.items())
        click.echo(
            f"the files are of several commits: {told}: `make benchmarks` measures all again"
        )
    for name in names or GUARDED:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", f"benchmarks.{name}", "--results-dir", folder]
            subprocess.run(command, check=True)
            found = results.read(name, folder=Path(folder))
        known = results.read(name, folder=on_file)
        complaints += [f"{name}: {text}" for text in worse(found, known, slack=slack)]
    if complaints:
        raise click.ClickException("\n".join(["these ratios got worse", *complaints]))
    click.echo("no ratio got worse")


def _by_commit(commits: Mapping[str, str]) -> dict[str, list[str]]:
    """The benchmarks of each commit, that of the fewest first."""
    found: dict[str, list[str]] = {}
    for name, commit in commits.items():
        found.setdefault(commit, []).append(name)
    return dict(sorted(found.items(), key=lambda each: len(each[1])))


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
