"""The systems that are compared: how each is started on a task, and what all of them are asked.

Each gets the setting in which it was fastest on two cores. Of TRL these run on a CPU:

    trl            GRPOTrainer, transformers generation, one process
    trl ddp        the same, two ranks: the usual way to use two devices
    trl colocate   the same, two ranks with a vLLM engine in each (see trl_vllm.py)

NOT_RUN says what does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.launch.child_processes import POLL_INTERVAL_S
from async_grpo.util.errors import DeadlineError, WorkerError
from benchmarks import stack as stacks
from benchmarks.cores import end, family
from benchmarks.end_to_end import ours
from benchmarks.end_to_end.task import Task
from benchmarks.end_to_end.watch import Note, Watch
from benchmarks.processes import Process

OURS = "ours"
NOT_RUN = (
    "Not run: TRL's vLLM server mode and its experimental asynchronous trainer. Both send weights "
    "by NCCL alone and end without a CUDA device; their transfer would have to be rewritten."
)
RUN_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class TrlWay:
    """How TRL is run."""

    num_ranks: int
    num_threads: int  # a rank
    way: str = "transformers"


TRL = {
    "trl": TrlWay(num_ranks=1, num_threads=2),
    "trl ddp": TrlWay(num_ranks=2, num_threads=1),
    "trl colocate": TrlWay(num_ranks=2, num_threads=1, way="colocate"),
}
NAMES = (OURS, *TRL)


@dataclass(frozen=True, slots=True)
class Step:
    """What a system says of one of its steps."""

    reward: float
    samples: int
    tokens: float  # of the samples' outputs
    trained_tokens: float  # of these, those that went through a forward and backward pass


@dataclass(frozen=True, slots=True)
class Run:
    """What was seen of one system on one task."""

    rows: Sequence[Step]
    notes: Sequence[Note]
    peak_memory_bytes: int


def run(name: str, task: Task, *, folder: Path, until: Callable[[Sequence[Step]], bool]) -> Run:
    """Do the task from nothing, until it is done or the rows say that it is enough."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows = rows_file(name, folder)
    roots: list[Process] = []
    with (
        Watch(rows, roots=lambda: tuple(process.pid for process in roots)) as watch,
        _started(name, task, folder, roots=roots) as trainer,
    ):
        _wait(trainer, roots, lambda: until(read_rows(rows)))
    return Run(read_rows(rows), watch.notes, watch.peak_memory_bytes)


@contextlib.contextmanager
def _started(name: str, task: Task, folder: Path, *, roots: list[Process]) -> Iterator[Process]:
    """The process that trains; `roots` gets it and whatever else belongs to the system."""
    with contextlib.ExitStack() as running:
        if name != OURS:
            trainer = _trl(TRL[name], task, folder)
        else:
            stack = running.enter_context(stacks.start(folder, variables=ours.variables(task)))
            roots.append(stack.head)
            # Ray would drain for 20 s, when nothing of it is needed any more.
            running.callback(lambda: end(family(stack.head.pid)))
            running.enter_context(ours.workers(stack, task, started=roots.append))
            trainer = ours.trainer(stack, task, output=folder / "run")
        running.enter_context(trainer)
        roots.append(trainer)
        yield trainer


def _trl(way: TrlWay, task: Task, folder: Path) -> Process:
    launcher = [sys.executable]
    if way.num_ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(way.num_ranks)]
    command = [
        *(*launcher, "-m", "benchmarks.end_to_end.trl_train"),
        *(str(task.write(folder / "task.json")), str(rows_file("trl", folder))),
        *("--way", way.way),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(way.num_threads), "HF_HUB_OFFLINE": "1"}
    return Process("TRL", command, log=folder / "trl.log", environment=environment)


def _wait(trainer: Process, watched: Sequence[Process], is_enough: Callable[[], bool]) -> None:
    """Until the trainer ends well, or has done enough."""
    deadline = time.monotonic() + RUN_TIMEOUT_S
    others = [process for process in watched if process is not trainer]
    while trainer.is_running and not is_enough():
        if time.monotonic() > deadline:
            raise DeadlineError(f"{trainer.name} was not done within {RUN_TIMEOUT_S:g} s")
        if ended := [other.name for other in others if not other.is_running]:
            raise WorkerError(f"{ended[0]} ended early")
        time.sleep(POLL_INTERVAL_S)
    if not trainer.is_running:
        trainer.wait()


def rows_file(name: str, folder: Path) -> Path:
    """Where the system writes a line for each step."""
    return folder / "run/training_metrics.jsonl" if name == OURS else folder / "rows.jsonl"


def read_rows(file: Path) -> list[Step]:
    """The whole lines of a file that may still be written, or not be there yet."""
    text = file.read_text() if file.exists() else ""
    return [as_step(json.loads(line)) for line in text.split("\n")[:-1]]


def as_step(row: Mapping[str, Any]) -> Step:
    """A line of our metrics, or one of `trl_train`.

    >>> as_step({"reward": 0.5, "samples": 8, "tokens": 90.0})
    Step(reward=0.5, samples=8, tokens=90.0, trained_tokens=90.0)
    """
    if "avg_reward" not in row:
        return Step(row["reward"], row["samples"], row["tokens"], row["tokens"])
    tokens = row["avg_output_tokens"] * row["num_samples"]
    return Step(row["avg_reward"], row["num_samples"], tokens, row["trained_tokens"])
