"""How many sequences an engine should be leased beyond its places, on paper.

A question's group holds its places until its longest answer is there; without more groups in the
engine's own line, the places of its shorter answers stay empty until then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import click

from benchmarks import results
from benchmarks.results import Figure
from benchmarks.scaling.cases import Case
from benchmarks.scaling.hardware import MODELS
from benchmarks.scaling.report import SHARE, Row

STALENESS = 2
OVERHEADS = (8, 64, 256)  # 8 is the default of --overhead-seqs
SCARCE = (Case(MODELS["7B"], 64), 10)  # engines that cannot hold all that may be generated


def overhead_figures(runs: Callable[[Iterable[tuple[Case, int, int]]], list[Row]]) -> list[Figure]:
    """Samples/s by that of the default."""
    case, engines = SCARCE
    rows = runs(
        (dataclasses.replace(case, overhead_seqs=seqs), engines, STALENESS) for seqs in OVERHEADS
    )
    figures, lines, default = [], [], rows[0].outcome.samples_per_second
    for seqs, row in zip(OVERHEADS, rows, strict=True):
        o = row.outcome
        at = f"{case.name} devices, {engines} engines, {seqs} sequences leased beyond an engine's"
        faster = o.samples_per_second / default
        lines.append((str(seqs), f"{o.samples_per_second:.1f}", f"{o.slots_filled:.1%}"))
        figures += [
            Figure(f"{at}, slots filled", o.slots_filled, SHARE, "higher"),
            Figure(f"{at}, samples / with {OVERHEADS[0]}", faster, "x", "higher"),
        ]
    header = ("leased beyond an engine's places", "samples/s", "slots filled")
    click.echo(f"\n{case.name} devices, {engines} engines\n{results.table(header, lines)}")
    return figures
