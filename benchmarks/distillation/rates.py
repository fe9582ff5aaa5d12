"""Steps a minute with a teacher of the student's size against GRPO with a KL penalty.

Both ask one more model of the same size about every sample, and train every sample. The learning
rate is 0, so that both do the same work; one generation worker, reference, teacher and rank.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import stack as stacks
from benchmarks.alternation import alternate, ratios
from benchmarks.processes import Process
from benchmarks.results import Figure, median
from benchmarks.stack import MODEL, READY_TIMEOUT_S, Stack
from benchmarks.two_cores import FIRST_ROW, read_rows

TEACHER, KL = "topk teacher", "GRPO with KL"
VARIANTS: Mapping[str, Mapping[str, object]] = {
    KL: {"kl_coefficient": 0.04},
    TEACHER: {"teacher_for": "same", "gkd_coefficient": 1.0},
}
GOAL = 0.8


def figures(folder: Path, *, num_batches: int, repeats: int) -> list[Figure]:
    """Rates of both, and the ratio of each turn."""
    shutil.rmtree(folder, ignore_errors=True)
    with (
        stacks.start(folder) as stack,
        stacks.generation_worker(stack, MODEL, reward="countdown", log="generation") as worker,
        _scorer(stack, "logprob"),
        _scorer(stack, "teacher", "--name", "same"),
    ):
        puzzles = stacks.write_puzzles(folder / "puzzles.jsonl", seed=0)

        def run(name: str) -> Callable[[], float]:
            return lambda: _steps_a_minute(stack, worker, puzzles, name, num_batches=num_batches)

        found = alternate({name: run(name) for name in VARIANTS}, repeats=repeats, warmups=0)
    return [
        *(median(f"steps, {n}", rates, "1/min", better="higher") for n, rates in found.items()),
        median(
            f"steps a minute, {TEACHER} / {KL}",
            ratios(found[TEACHER], by=found[KL]),
            "x",
            better="higher",
            goal=GOAL,
        ),
    ]


@contextlib.contextmanager
def _scorer(stack: Stack, mode: str, *options: str) -> Iterator[None]:
    command = [
        *(sys.executable, "worker_dispatcher.py", "--mode", mode, *options),
        *("--model-path", str(MODEL), "--max-tokens-per-gpu", "4096"),
    ]
    log = stack.folder / "logs" / f"{mode}.log"
    with Process(f"the {mode} worker", command, log=log, environment=stack.environment) as process:
        process.wait_for("registered", timeout_s=READY_TIMEOUT_S)
        yield


def _steps_a_minute(
    stack: Stack, worker: Process, puzzles: Path, name: str, *, num_batches: int
) -> float:
    """Between the first counted row and the last but two, for which nothing is generated."""
    output = stack.folder / name.replace(" ", "-")
    options: dict[str, Any] = {
        "data_path": puzzles,
        "batch_size": 32,
        "samples_per_question": 8,
        "num_training_batches": num_batches,
        "learning_rate": 0.0,
        "overwrite": True,
        **VARIANTS[name],
    }
    with stacks.trainer(stack, MODEL, output=output, options=options) as process:
        process.wait(watched=[worker])
    rows = read_rows(output / "training_metrics.jsonl")[FIRST_ROW:-2]
    return 60 * len(rows) / sum(row["seconds"] for row in rows)
