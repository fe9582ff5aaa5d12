"""What several registries, several batchers and shared packing of weights change, on paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.results import Figure
from benchmarks.scaling import cases
from benchmarks.scaling.cases import Case
from benchmarks.scaling.hardware import MODELS, PACK_BYTES_PER_S
from benchmarks.scaling.report import SHARE, Row, show_case

STALENESS = 2
SHORT_MEDIAN = 100
# (registries, batchers, ranks that pack weights; with several, a tree takes them to the nodes)
WAYS = ((1, 1, 1), (8, 8, 1), (1, 1, 8), (8, 8, 8))


def short(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Lognormal, median 100 tokens, cut at 1,024: short answers, where control planes work most."""
    return np.clip(rng.lognormal(np.log(SHORT_MEDIAN), 0.7, count), 4, 1_024).astype(np.int64)


QUICK_WAYS = ((1, 1, 1), (1, 2, 2))
QUICK = (Case(MODELS["7B"], 8, lengths=short),)
SHARDED = (
    Case(MODELS["7B"], 512, lengths=short),
    Case(MODELS["7B"], 10_000, lengths=short),
)


def shard_figures(
    runs: Callable[[Iterable[tuple[Case, int, int]]], list[Row]],
    chosen: Sequence[Case],
    *,
    quick: bool,
) -> list[Figure]:
    """Every way on every cluster; its samples/s by those of one of each."""
    ways = QUICK_WAYS if quick else WAYS
    asked = [(_with(case, way), _engines(case), STALENESS) for case in chosen for way in ways]
    rows = iter(runs(asked))
    figures = []
    for _ in chosen:
        found = [next(rows) for _ in ways]
        one = found[0].outcome.samples_per_second
        for way, row in zip(ways, found, strict=True):
            click.echo(show_case([row]).replace("devices:", f"devices, {_name(way)}:"))
            at = f"short answers, {row.case.name} devices, {_name(way)}"
            o = row.outcome
            figures += [
                Figure(f"{at}, samples", o.samples_per_second, "samples/s", "higher"),
                Figure(f"{at}, samples / one of each", o.samples_per_second / one, "x", "higher"),
                *(Figure(f"{at}, {part}", s, SHARE) for part, s in row.parts().items()),
            ]
    return figures


def _engines(case: Case) -> int:
    """An even split that leaves every batcher a whole group of ranks."""
    return cases.even_flow(case, max_staleness=STALENESS)


def _with(case: Case, way: tuple[int, int, int]) -> Case:
    registries, batchers, packers = way
    return dataclasses.replace(
        case,
        num_registries=registries,
        num_batchers=batchers,
        pack_bytes_per_s=PACK_BYTES_PER_S * packers,
        by_tree=packers > 1,
    )


def _name(way: tuple[int, int, int]) -> str:
    return f"{way[0]} registries, {way[1]} batchers, {way[2]} packing"
