"""The recipes of `examples/`, from several seeds, and TRL's GKDTrainer on the first of them.

Accuracy is that of `sample-data/measure_countdown.py`: 100 held-out questions of each kind, each
sampled 64 times at temperature 1. Times are of whole runs, from the command to its end.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.cli.local_run import planned
from async_grpo.cli.run_file import read_tables
from async_grpo.config.teaching import EVERY_TYPE
from benchmarks.distillation.trl_gkd import Distilled
from benchmarks.processes import Process
from benchmarks.results import Figure, median

EXAMPLES = {"one teacher": "examples/distil_tiny.toml", "two": "examples/distil_two_teachers.toml"}
ACCURACY_GOALS = {"one teacher": 0.95, "two": 0.90}  # student's by its teacher's
MOST_S = 600.0
NUM_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run reached."""

    seconds: float
    accuracy: Mapping[str, float]  # by kind of puzzle


def figures(folder: Path, *, names: Sequence[str], seeds: int, with_trl: bool) -> list[Figure]:
    """Of each of these recipes, and of TRL's runs after ours of the same seed."""
    found: list[Figure] = []
    for name in names:
        example = EXAMPLES[name]
        teachers = teachers_of(example)
        by_teacher = {kind: accuracy(path, kind) for kind, path in teachers.items()}
        ours, theirs = [], []
        for seed in range(seeds):
            run = folder / f"{Path(example).stem}-{seed}"
            ours.append(_ours(example, run, seed=seed, kinds=tuple(teachers)))
            if with_trl and len(teachers) == 1:
                theirs.append(_trl(example, run.with_name(f"{run.name}-trl"), seed=seed))
        found += _figures(name, ours, by_teacher)
        found += _figures(f"{name}, TRL", theirs, by_teacher) if theirs else []
    return found


def teachers_of(example: str) -> dict[str, Path]:
    """{kind of puzzles: folder of its teacher}; a teacher that is named alone teaches sums."""
    run = planned(config=example, train_options=(), prepare="", num_cpus=0, ray_address="")
    paths = {worker.name: Path(worker.model_path) for worker in run.workers}
    routes = run.train.teacher_routes.items()
    return {"add" if kind == EVERY_TYPE else kind: paths[name] for kind, name in routes}


def accuracy(model: Path, kind: str) -> float:
    """Share of the samples that solve their held-out puzzle."""
    sys.path.insert(0, "sample-data")
    measure, puzzles = map(
        importlib.import_module, ("measure_countdown", "countdown_demonstrations")
    )
    tasks = puzzles.split_tasks(kind)[1]
    result: float = measure.measure(model, tasks=tasks, num_samples=NUM_SAMPLES).accuracy
    return result


def _ours(example: str, output: Path, *, seed: int, kinds: Sequence[str]) -> Outcome:
    command = [
        *(sys.executable, "-m", "async_grpo.cli.main", "launch", example),
        *("--infinite-sampler-seed", str(seed), "--output-dir", str(output), "--overwrite"),
    ]
    seconds = _timed("the recipe", command, log=output.with_suffix(".log"))
    models = sorted(output.glob("hf_format/samples_*"), key=lambda path: path.stat().st_mtime)
    return Outcome(seconds, {kind: accuracy(models[-1], kind) for kind in kinds})


def _trl(example: str, output: Path, *, seed: int) -> Outcome:
    """Two ranks, as ours; the questions are those that our run has made."""
    (train,) = read_tables(example)[1]["train"]
    output.mkdir(parents=True, exist_ok=True)
    task = task_of(train, teacher=teachers_of(example)["add"], seed=seed)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "benchmarks.distillation.trl_gkd"),
        *(str(task.write(output / "task.json")), str(output)),
    ]
    seconds = _timed("TRL", command, log=output.with_suffix(".log"))
    return Outcome(seconds, {"add": accuracy(output, "add")})


def task_of(train: Mapping[str, Any], *, teacher: Path, seed: int) -> Distilled:
    """The recipe's [train] table as TRL's trainer is given it."""
    return Distilled(
        student=train["model_name_or_path"],
        teacher=str(teacher),
        questions=train["data_path"],
        num_steps=train["num_training_batches"],
        batch_size=train["batch_size"] * train["samples_per_question"],
        samples_per_question=train["samples_per_question"],
        learning_rate=train["learning_rate"],
        num_warmup_steps=train["num_warmup_steps"],
        alpha=train["gkd_alpha"],
        max_output_tokens=train["max_generation_tokens"],
        seed=seed,
    )


def _timed(name: str, command: Sequence[str], *, log: Path) -> float:
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    with Process(name, list(command), log=log, environment=environment) as process:
        process.wait()
    return time.monotonic() - began


def _figures(name: str, runs: Sequence[Outcome], by_teacher: Mapping[str, float]) -> list[Figure]:
    goal = ACCURACY_GOALS.get(name)
    seconds = [run.seconds for run in runs]
    found = [median(f"{name}, whole run", seconds, "s", goal=None if goal is None else MOST_S)]
    for kind, teacher in by_teacher.items():
        values = [run.accuracy[kind] for run in runs]
        title = f"{name}, {kind}, held-out accuracy"
        found += [
            median(title, values, "fraction", better="higher"),
            median(
                f"{title} / teacher's",
                [v / teacher for v in values],
                "x",
                better="higher",
                goal=goal,
            ),
        ]
    return found
