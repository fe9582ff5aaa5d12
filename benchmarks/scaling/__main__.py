"""Scale on paper: `python -m benchmarks.scaling`; see docs/scaling.md.

The whole service is simulated at 8 to 10,000 devices, with the real admission, balancer, ledger,
rounds and packing. First the same simulation predicts what was measured on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import click

from benchmarks import results
from benchmarks.results import Figure
from benchmarks.scaling import cases, hardware, report, shards
from benchmarks.scaling.cases import CASES, Case
from benchmarks.scaling.leases import overhead_figures
from benchmarks.scaling.report import Row
from benchmarks.scaling.scripted import scripted_figures
from benchmarks.scaling.validation import validation_figures

NAME = "scaling"
BOUNDS = (0, 1, 2, 4)
SPLIT_AT = 1  # the staleness for which devices are split
QUICK = ("1.5B on 8", "7B on 64")
T = TypeVar("T")
Runs = Callable[[Iterable[tuple[Case, int, int]]], list[Row]]


@click.command()
@click.option("--quick", is_flag=True, help="two small clusters, two bounds")
@click.option("--jobs", default=os.cpu_count() or 1, help="simulations at a time")
@click.option("--results-dir", default=str(results.FOLDER), help="where scaling.json goes")
def main(quick: bool, jobs: int, results_dir: str) -> None:
    """Simulate the service at scale."""
    click.echo(f"{results.machine()}, {results.load()}; times are those of the simulation")
    figures = [*compare_with_runs(quick=quick), *hardware.latency_figures()]
    click.echo(f"\n{results.show(figures)}")
    chosen = [case for case in CASES if not quick or case.name in QUICK]
    with ProcessPoolExecutor(jobs) as pool:

        def runs(asked: Iterable[tuple[Case, int, int]]) -> list[Row]:
            return list(pool.map(_run, asked))

        figures += clusters(chosen, runs, quick=quick)
        if not quick:
            figures += overhead_figures(runs)
        figures += shards.shard_figures(
            runs, shards.QUICK if quick else shards.SHARDED, quick=quick
        )
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}")


def compare_with_runs(*, quick: bool) -> list[Figure]:
    """Predicted by measured; the real runs are those on file."""
    values = {figure.name: figure.value for figure in results.read("staleness")}
    bounds = (0, 1) if quick else (0, 1, 2)
    return [*scripted_figures(bounds=bounds), *validation_figures(values, bounds=bounds)]


def clusters(chosen: Sequence[Case], runs: Runs, *, quick: bool) -> list[Figure]:
    """Split the devices of each cluster, then compare bounds with that split."""
    bounds = BOUNDS[:2] if quick else BOUNDS
    asked = [
        (case, engines, SPLIT_AT)
        for case in chosen
        for engines in ([cases.even_flow(case)] if quick else cases.splits(case))
    ]
    tried: dict[Case, dict[int, Row]] = {case: {} for case in chosen}
    for row in runs(asked):
        tried[row.case][row.engines] = row
    best = {case: _best(rows) for case, rows in tried.items()}
    others = [(case, best[case], bound) for case in chosen for bound in bounds if bound != SPLIT_AT]
    found = {(row.case, row.max_staleness): row for row in runs(others)}
    figures = []
    for case in chosen:
        found[case, SPLIT_AT] = tried[case][best[case]]
        rows = [found[case, bound] for bound in bounds]
        click.echo(report.show_case(rows))
        click.echo(report.bottleneck_line(rows[-1]))
        speeds = {n: row.outcome.samples_per_second for n, row in tried[case].items()}
        figures += [
            report.split_figure(case, speeds),
            *report.case_figures(rows),
            *report.limits(rows[-1]),
        ]
    return figures


def _best(rows: dict[int, Row]) -> int:
    return max(rows, key=lambda engines: rows[engines].outcome.samples_per_second)


def _run(asked: tuple[Case, int, int]) -> Row:
    case, engines, max_staleness = asked
    return Row(case, engines, max_staleness, cases.run(case, engines, max_staleness))


if __name__ == "__main__":
    main()
