"""Attention over packed rows, forward and backward, against padded batches and a dense mask.

One layer of two query heads and one key-value head of 64. `packed` is what the trainer calls;
`padded` computes every sequence at the longest one's length; `dense mask` is a packed row without
an attention that knows its sequences. All three attend from the same sequences. Rows hold 4,096
tokens, cut into sequences of one length, of reasoning runs, and of the quick start's answers.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click
import numpy as np
import torch

from benchmarks import results
from benchmarks.alternation import alternate, ratios
from benchmarks.gpu.attention import Attend, Row, dense_mask, packed, padded, random_row, run
from benchmarks.gpu.shapes import Shape
from benchmarks.results import Figure, median

NAME = "attention"
CPU = torch.device("cpu")
SHAPE = Shape(
    name="one layer",
    hidden=128,
    intermediate=384,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    vocabulary=128,
    is_tied=True,
)
SHORTEST_TURN_S = 0.25
GOAL = 1.1  # packed by padded: what knowing the boundaries may cost where nothing is padded


def even(length: int, *, num_tokens: int) -> list[int]:
    """
    >>> even(4, num_tokens=12)
    [4, 4, 4]
    """
    return [length] * (num_tokens // length)


def heavy_tailed(num_tokens: int) -> list[int]:
    """Lognormal, a median of 400, filling the row: one answer takes a good part of it.

    >>> sum(heavy_tailed(8192)), sum(heavy_tailed(512))
    (8192, 512)
    """
    draws = np.random.default_rng(0).lognormal(np.log(400), 1.2, num_tokens).astype(int)
    return _cut(np.clip(draws, 16, num_tokens).tolist(), num_tokens)


def short(num_tokens: int) -> list[int]:
    """Prompts with answers of 20 to 80 tokens, as in the quick start.

    >>> sum(short(8192)), max(short(8192)) <= 80
    (8192, True)
    """
    return _cut(np.random.default_rng(0).integers(20, 81, num_tokens).tolist(), num_tokens)


def _cut(lengths: Sequence[int], num_tokens: int) -> list[int]:
    """The first lengths, the last one shortened so that they fill the row.

    >>> _cut([5, 4, 3], 7)
    [5, 2]
    """
    ends = np.minimum(np.cumsum(lengths), num_tokens)
    segments = np.diff(ends, prepend=0)
    return [int(length) for length in segments if length]


@click.command()
@click.option("--num-tokens", default=4096, help="tokens of a row")
@click.option("--repeats", default=3, help="turns after the first")
@click.option("--quick", is_flag=True, help="small rows, to show that all of it runs")
@click.option("--results-dir", default=str(results.FOLDER), help="where attention.json goes")
def main(num_tokens: int, repeats: int, quick: bool, results_dir: str) -> None:
    """Measure attention by lengths of sequences."""
    if quick:
        num_tokens, repeats = 1024, 1
    click.echo(f"{results.machine()}, {results.load()}, {torch.get_num_threads()} threads")
    figures: list[Figure] = []
    for title, lengths in cuts(num_tokens).items():
        figures += compare(title, lengths, repeats=repeats)
    click.echo(results.show(figures))
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}")


def cuts(num_tokens: int) -> Mapping[str, list[int]]:
    """Lengths by title: each length that divides the row, and two distributions."""
    each = [length for length in (128, 512, 2048, 8192) if length <= num_tokens]
    fixed = {f"{length} tokens each": even(length, num_tokens=num_tokens) for length in each}
    return fixed | {"heavy tail": heavy_tailed(num_tokens), "20 to 80 tokens": short(num_tokens)}


def compare(title: str, lengths: Sequence[int], *, repeats: int) -> list[Figure]:
    """Seconds of each way, and packed by the others."""
    row = make_row(1, sum(lengths))
    wide = make_row(len(lengths), max(lengths))
    variants = {
        "packed": _timed(packed(lengths, CPU), row),
        "padded": _timed(padded(lengths, CPU), wide),
        "dense mask": _timed(dense_mask(lengths, CPU), row),
    }
    seconds = alternate(variants, repeats=repeats)
    figures = [median(f"{title}, {way}, time", values, "s") for way, values in seconds.items()]
    for way in ("padded", "dense mask"):
        by = ratios(seconds["packed"], seconds[way])
        figures.append(median(f"{title}, packed / {way}, time", by, "x", goal=GOAL))
    return figures


def make_row(num_rows: int, num_tokens: int) -> Row:
    torch.manual_seed(0)
    return random_row(SHAPE, num_tokens, device=CPU, dtype=torch.float32, num_rows=num_rows)


def _timed(attend: Attend, row: Row) -> Callable[[], float]:
    return functools.partial(_seconds, attend, row)


def _seconds(attend: Attend, row: Row) -> float:
    """Of one pass: the mean over as many as make a turn long enough to be timed."""
    started, num_passes = time.perf_counter(), 0
    while time.perf_counter() - started < SHORTEST_TURN_S:
        run(attend, row)
        num_passes += 1
    return (time.perf_counter() - started) / num_passes


if __name__ == "__main__":
    main()
