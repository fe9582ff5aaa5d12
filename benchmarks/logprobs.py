"""Log-probabilities and loss over a vocabulary of 152k: chunks of logits against all of them.

Time is measured in alternation, forward and backward together, with a hidden size of 896: the
smallest model with that vocabulary (Qwen2.5-0.5B); the larger it is, the less weighs what is not a
matrix product. Chunks compute the logits twice: 4 products instead of 3, so 1.33 is their bound.
Memory is the high-water mark that the kernel saw of a process that did nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click
import torch

from benchmarks import heads, results
from benchmarks.alternation import alternate, ratios
from benchmarks.head_memory import Peaks, measure
from benchmarks.heads import Head, Inputs
from benchmarks.results import Figure, median

NAME = "logprobs"
FULL, CHEAPEST = "full logits", "full logits without entropy"
GOAL_TIME = 1.4  # by the full logits'
GOAL_CHUNKS = 3.0  # tensors [chunk, V] that live at the peak
MEMORY_HIDDEN_SIZE = 64  # what the logits take does not depend on it


@click.command()
@click.option("--chunk-sizes", default="128,256", help="tokens whose logits live at a time")
@click.option("--vocab-size", default=151_936, help="of Qwen2.5")
@click.option("--hidden-size", default=512, help="where time is measured")
@click.option("--num-tokens", default=512, help="where time is measured")
@click.option("--num-memory-tokens", default=2048, help="where memory is measured")
@click.option("--repeats", default=3, help="turns after the first")
@click.option("--quick", is_flag=True, help="small sizes, to show that all of it runs")
@click.option("--results-dir", default=str(results.FOLDER), help="where logprobs.json goes")
def main(
    chunk_sizes: str,
    vocab_size: int,
    hidden_size: int,
    num_tokens: int,
    num_memory_tokens: int,
    repeats: int,
    quick: bool,
    results_dir: str,
) -> None:
    """Measure the head by chunk size against full logits."""
    if quick:
        vocab_size, hidden_size, num_tokens, repeats = 32_000, 64, 256, 1
        chunk_sizes, num_memory_tokens = "64,128", 1024
    sizes = [int(size) for size in chunk_sizes.split(",")]
    click.echo(f"{results.machine()}, {results.load()}, {torch.get_num_threads()} threads")
    inputs = heads.make_inputs(num_tokens, vocab_size=vocab_size, hidden_size=hidden_size)
    figures = time_figures(sizes, inputs, repeats=repeats)
    figures += memory_figures(sizes, num_tokens=num_memory_tokens, vocab_size=vocab_size)
    click.echo(results.show(figures))
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}")


def time_figures(chunk_sizes: list[int], inputs: Inputs, *, repeats: int) -> list[Figure]:
    """Seconds of every way, and ours by the others'."""
    ways = {FULL: heads.full_logits, CHEAPEST: heads.cross_entropy}
    ours = {_title(size): heads.chunked(size) for size in chunk_sizes}
    variants = {name: _timed(way, inputs) for name, way in (ways | ours).items()}
    seconds = alternate(variants, repeats=repeats)
    figures = [median(f"{name}, time", values, "s") for name, values in seconds.items()]
    figures += [
        median(
            f"{name} / {other}, time", ratios(seconds[name], seconds[other]), "x", goal=GOAL_TIME
        )
        for name in ours
        for other in ways
    ]
    return figures


def memory_figures(chunk_sizes: list[int], *, num_tokens: int, vocab_size: int) -> list[Figure]:
    """Peaks beyond inputs and gradients, forward and backward, also in units of the logits."""
    sizes = {
        "num_tokens": num_tokens,
        "vocab_size": vocab_size,
        "hidden_size": MEMORY_HIDDEN_SIZE,
    }
    full = measure(0, **sizes)
    figures = _peak_figures(FULL, full)
    for chunk_size in chunk_sizes:
        name, peaks = _title(chunk_size), measure(chunk_size, **sizes)
        figures += _peak_figures(name, peaks)
        figures += _shares(name, peaks, full, chunk_bytes=4 * chunk_size * vocab_size)
    return figures


def _timed(way: Head, inputs: Inputs) -> Callable[[], float]:
    """Seconds of one forward and backward pass."""

    def run() -> float:
        started = time.perf_counter()
        heads.loss_of(way, inputs).backward()
        seconds = time.perf_counter() - started
        inputs.hidden.grad = inputs.weight.grad = None
        return seconds

    return run


def _title(chunk_size: int) -> str:
    return f"chunks of {chunk_size}"


def _peak_figures(name: str, peaks: Peaks) -> list[Figure]:
    return [
        Figure(f"{name}, peak memory of the forward pass", peaks.forward / 1e6, "MB"),
        Figure(f"{name}, peak memory of the backward pass", peaks.backward / 1e6, "MB"),
    ]


def _shares(name: str, peaks: Peaks, full: Peaks, *, chunk_bytes: int) -> list[Figure]:
    """Ours by the full form's, and by one chunk of logits.

    >>> full, ours = Peaks(4000, 3000), Peaks(200, 300)
    >>> [figure.value for figure in _shares("ours", ours, full, chunk_bytes=100)]
    [0.05, 0.1, 2.0, 3.0]
    """
    return [
        Figure(f"{name} / {FULL}, forward memory", peaks.forward / full.forward, "x"),
        Figure(f"{name} / {FULL}, backward memory", peaks.backward / full.backward, "x"),
        Figure(
            f"{name} / one chunk of logits, forward memory",
            peaks.forward / chunk_bytes,
            "x",
            goal=GOAL_CHUNKS,
        ),
        Figure(
            f"{name} / one chunk of logits, backward memory",
            peaks.backward / chunk_bytes,
            "x",
            goal=GOAL_CHUNKS,
        ),
    ]


if __name__ == "__main__":
    main()
