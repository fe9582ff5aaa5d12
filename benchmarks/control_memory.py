"""What the process that decides holds: flat over many batches, and little more with many questions.

The actors are those of `benchmarks.scripted_control`: real ones, whose workers answer at once and
whose ranks train nothing.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import ray

from async_grpo.cluster.cluster import Cluster
from async_grpo.data.table import QuestionTable
from async_grpo.types import Question
from benchmarks import procfs, results, scripted_control, stack
from benchmarks.results import Figure

NAME = "control_memory"
MIB = 2**20
NUM_RANKS = 4
BATCH_SIZE = 8
FEW = 1_000  # questions, of the run without many
MAX_GROWTH_MIB = 8.0  # over the batches after the first tenth
MAX_QUESTIONS_MIB = 300.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything is measured."""

    num_batches: int = 1_000
    num_questions: int = 1_000_000


QUICK = Size(num_batches=20, num_questions=20_000)


@dataclass(frozen=True, slots=True)
class Held:
    """Resident memory of the control process, in MiB, shared pages of Ray's object store apart."""

    private: float
    shared: float

    @classmethod
    def by(cls, actor: Any) -> Held:
        usage = procfs.usage(Cluster().process_of(actor))
        assert usage is not None
        return cls((usage.rss_bytes - usage.shared_bytes) / MIB, usage.shared_bytes / MIB)


@click.command()
@click.option("--quick", is_flag=True, help="a small size, which proves that everything runs")
@click.option("--results-dir", default=str(results.FOLDER), help="where control_memory.json goes")
def main(quick: bool, results_dir: str) -> None:
    """Measure the memory of the control process."""
    size = QUICK if quick else Size()
    click.echo(f"{results.machine()}, {results.load()}")
    with tempfile.TemporaryDirectory() as folder, stack.start(Path(folder)) as running:
        os.environ["RAY_AUTH_MODE"] = running.environment["RAY_AUTH_MODE"]
        Cluster.join(running.environment["RAY_ADDRESS"], namespace=NAME)
        try:
            figures = measure(size)
        finally:
            ray.shutdown()
    click.echo("\n" + results.show(figures))
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}, {results.load()}")


def measure(size: Size) -> list[Figure]:
    """A run with few questions, then one with many."""
    few = holding(QuestionTable.of(make_questions(FEW)), num_batches=size.num_batches)
    table = QuestionTable.of(make_questions(size.num_questions))
    many = holding(table, num_batches=size.num_batches // 10)  # the table is there from the first
    growth = few[-1].private - few[0].private
    above = many[-1].private - few[0].private
    over, number = f"over {size.num_batches} batches", f"{size.num_questions:,} questions"
    return [
        Figure("of the control process", few[0].private, "MiB"),
        Figure(f"growth {over}", growth, "MiB", goal=MAX_GROWTH_MIB),
        Figure(f"{number}, above {FEW:,}", above, "MiB", goal=MAX_QUESTIONS_MIB),
        Figure(f"{number}, in the node's object store", size_mib(table), "MiB"),
    ]


def holding(questions: Sequence[Question], *, num_batches: int) -> list[Held]:
    """Memory after each tenth of the batches."""
    controller, player, run = scripted_control.make_run(
        batch_size=BATCH_SIZE, questions=questions, num_ranks=NUM_RANKS
    )
    ranks = scripted_control.Ranks(controller, run, num_ranks=NUM_RANKS)
    found = []
    for _ in range(10):
        asyncio.run(ranks.train(num_batches=num_batches // 10))
        found.append(Held.by(controller))
    click.echo(
        f"{len(questions):,} questions: "
        + ", ".join(f"{held.private:.0f} + {held.shared:.0f}" for held in found)
        + " MiB (private + shared)"
    )
    scripted_control.end(controller, player)
    return found


def size_mib(table: QuestionTable) -> float:
    """Of the arrays; every process of a node shares them, and has the pages it read in its RSS."""
    arrays: list[pickle.PickleBuffer] = []
    pickle.dumps(table, protocol=5, buffer_callback=arrays.append)
    return sum(array.raw().nbytes for array in arrays) / MIB


def make_questions(number: int) -> Iterator[Question]:
    """Puzzles like those of the examples."""
    ids = np.arange(64, dtype=np.int32)
    for target in range(number):
        text = f"use 2 9 8 {target} to make {target + 15}\n"
        columns = {"input": text, "target": target + 15, "nums": [2, 9, 8, target]}
        yield Question(ids, text, str(target + 15), columns)


if __name__ == "__main__":
    main()
