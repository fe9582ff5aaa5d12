"""From the first command to the first optimizer step, by phase, with a tiny model on this machine.

Every run starts a Ray head of its own, a dispatcher with one generation worker, and a trainer.
`one by one`: each command is given when the one before says that it is ready. `at once`: dispatcher
and trainer together, as soon as Ray is up; the trainer waits for the worker, and what both import
overlaps. Phases are read from what the commands say: each lasts from the line before it. Seconds of
the processors are those that were spent by the first step; they do not depend on what else runs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from async_grpo.config.roles import GENERATION
from async_grpo.launch import interrupts
from benchmarks import results, stack
from benchmarks.alternation import turns
from benchmarks.cores import cpu_seconds, family, titled
from benchmarks.processes import Process
from benchmarks.results import Figure, median
from benchmarks.stack import MODEL, Stack
from benchmarks.timeline import Timeline, phases

NAME = "startup"
GOAL_S = 60.0  # on two cores
READY_TIMEOUT_S = 300.0
POLL_INTERVAL_S = 0.02
HELP_TURNS = 3
VARIANTS = ("one by one", "at once", "at once, torchrun with 2 ranks")
SHARED = ("Controller", "VerifierPool")
HEAVY = ("ray", "torch", "transformers", "vllm")
COMMANDS = ("worker_dispatcher.py", "trainer_core.py", "plot.py")
MODULES = {
    "the dispatcher": "async_grpo.launch.dispatcher",
    "a trainer rank": "async_grpo.run.loop",
    "a generation worker": "async_grpo.rollout.engine",
    "the controller": "async_grpo.controller.controller",
    "the verifier pool": "async_grpo.verification.pool",
}
WORKER = f"worker {GENERATION}-"  # a pool of verifiers says the same, and sooner
DISPATCHER_SAYS: Mapping[str, tuple[str, ...]] = {
    "dispatcher: options, imports, join the cluster": ("joined the Ray cluster",),
    "dispatcher: look for room": ("starting ",),
    "worker: process, imports, engine": (WORKER, "is ready after"),
    "worker: registered": (WORKER, "registered"),
}
TRAINER_SAYS: Mapping[str, tuple[str, ...]] = {
    "trainer: imports, questions": ("questions to train on",),
    "trainer: join the cluster": ("joined the Ray cluster",),
    "trainer: find workers, begin the run": ("outputs end with",),
    "trainer: policy and optimizer": ("policy and optimizer are ready",),
}


@dataclass(frozen=True, slots=True)
class Started:
    """One run up to its first optimizer step."""

    seconds: float
    phases: Mapping[str, float]  # seconds, in order
    cpu: Mapping[str, float]  # seconds by role


@click.command()
@click.option("--repeats", default=3, help="runs of each variant")
@click.option("--quick", is_flag=True, help="one run, one by one, to show that all of it runs")
@click.option("--output-dir", default="runs/benchmarks/startup", help="replaced")
@click.option("--results-dir", default=str(results.FOLDER), help="where startup.json goes")
def main(repeats: int, quick: bool, output_dir: str, results_dir: str) -> None:
    """Time a run from its first command to its first optimizer step."""
    interrupts.interrupt_once()  # so that SIGTERM too ends what was started
    click.echo(f"{results.machine()}, {results.load()}")
    shutil.rmtree(output_dir, ignore_errors=True)
    figures = _help_figures() + _import_figures()
    variants = VARIANTS[:1] if quick else VARIANTS
    runs: dict[str, list[Started]] = {variant: [] for variant in variants}
    for number, variant in enumerate(turns(variants, repeats=1 if quick else repeats)):
        started = start_once(Path(output_dir) / str(number), variant)
        click.echo(f"{variant}: {started.seconds:.1f} s, {results.load()}")
        runs[variant].append(started)
    figures += figures_of(runs)
    click.echo(f"\n{results.show(figures)}")
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}, {results.load()}")


def _help_figures() -> list[Figure]:
    """What `--help` of each command costs, and whether it imports what takes seconds."""
    figures = []
    for script in COMMANDS:
        spent = [_spend(script, "--help") for _ in range(HELP_TURNS)]
        figures.append(median(f"{script} --help", [wall for wall, _ in spent], "s", goal=1.0))
        figures.append(
            Figure(f"{script} --help, of {', '.join(HEAVY)}", len(_imported_by_help(script)),
                   "packages imported", goal=0.0)
        )  # fmt: skip
    return figures


def _import_figures() -> list[Figure]:
    return [
        Figure(f"imports of {who}", _spend("-c", f"import {module}")[1], "CPU s")
        for who, module in MODULES.items()
    ]


def _spend(*arguments: str) -> tuple[float, float]:
    """Seconds, and seconds of the processors, of one Python process."""
    before, began = os.times(), time.monotonic()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = os.times()
    spent = after.children_user + after.children_system
    return time.monotonic() - began, spent - before.children_user - before.children_system


def _imported_by_help(script: str) -> list[str]:
    code = (
        f"import runpy, sys; sys.argv = [{script!r}, '--help']\n"
        f"try: runpy.run_path({script!r}, run_name='__main__')\n"
        f"finally: print(*sorted(set(sys.modules) & set({HEAVY!r})), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stderr.split()


def start_once(folder: Path, variant: str) -> Started:
    """One run, on a cluster of its own; raises what a command of it raised."""
    began = time.monotonic()
    with stack.start(folder) as running:
        head_up = time.monotonic()
        puzzles = stack.write_puzzles(folder / "puzzles.jsonl", seed=0, num_questions=500)
        files = {
            "dispatcher": folder / "logs" / "dispatcher.log",
            "trainer": folder / "logs" / "trainer.log",
            "samples": folder / "run" / "samples.jsonl",
            "rows": folder / "run" / "training_metrics.jsonl",
        }
        with Timeline(files) as timeline, _dispatcher(running, files["dispatcher"]) as worker:
            worker_began = time.monotonic()
            if variant == "one by one":
                worker.wait_for_worker(timeout_s=READY_TIMEOUT_S)
            ranks = 2 if "torchrun" in variant else 0
            with _trainer(running, puzzles, files["trainer"], ranks=ranks) as trainer:
                trainer_began = time.monotonic()
                _until_first_step(files["rows"], trainer, watched=worker)
                cpu = _spent(running, worker, trainer)
        found = {"ray start": head_up - began}
        if variant == "one by one":
            found |= _phases(timeline, "dispatcher", worker_began, DISPATCHER_SAYS)
            found |= worker_phases(timeline.first("dispatcher", WORKER, "is ready after")[1])
        found |= _trainer_phases(timeline, trainer_began)
        # The puzzles are no part of a user's start.
        return Started(
            timeline.first("rows", "{")[0] - worker_began + found["ray start"], found, cpu
        )


def _dispatcher(running: Stack, log: Path) -> Process:
    return Process(
        "the generation worker",
        [
            *(sys.executable, "worker_dispatcher.py", "--model-path", str(MODEL)),
            *("--max-model-len", "256", "--max-num-seqs", "256"),
            *("--reward-fns", "countdown", "--global-num-verifiers", "2"),
        ],
        log=log,
        environment=running.environment,
    )


@contextmanager
def _trainer(running: Stack, puzzles: Path, log: Path, *, ranks: int) -> Iterator[Process]:
    """The trainer of one batch; it is let end by itself."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    process = Process(
        "the trainer",
        [
            *(sys.executable, *(torchrun if ranks else ()), "trainer_core.py"),
            *("--model-name-or-path", str(MODEL), "--data-path", str(puzzles)),
            *("--output-dir", str(log.parent.parent / "run"), "--num-training-batches", "1"),
            *("--batch-size", "16", "--samples-per-question", "8"),
            *("--max-generation-tokens", "64", "--max-tokens-per-gpu", "4096", "--trackers", ""),
        ],
        log=log,
        environment=running.environment,
    )
    with process:
        yield process
        process.wait()


def _until_first_step(rows: Path, trainer: Process, *, watched: Process) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not (rows.exists() and rows.read_text().count("\n")):
        if time.monotonic() > deadline or not trainer.is_running or not watched.is_running:
            trainer.wait(watched=[watched])
            raise RuntimeError(f"no optimizer step within {READY_TIMEOUT_S:g} s, see {rows.parent}")
        time.sleep(POLL_INTERVAL_S)


def _spent(running: Stack, worker: Process, trainer: Process) -> dict[str, float]:
    """Seconds of the processors so far, by role."""
    cluster = family(running.head.pid)
    engine = running.generator_pids()
    shared = set().union(*(family(*titled(cluster, f"ray::{name}")) for name in SHARED))
    return {
        "dispatcher": cpu_seconds(family(worker.pid)),
        "generation worker and engine": cpu_seconds(engine),
        "trainer": cpu_seconds(family(trainer.pid)),
        "controller and verifiers": cpu_seconds(shared - engine),
        "Ray": cpu_seconds(cluster - engine - shared),
    }


def _phases(
    timeline: Timeline, name: str, began: float, says: Mapping[str, tuple[str, ...]]
) -> dict[str, float]:
    said = [(phase, timeline.first(name, *texts)[0]) for phase, texts in says.items()]
    return phases(began, said)


def _trainer_phases(timeline: Timeline, began: float) -> dict[str, float]:
    said = [(phase, timeline.first("trainer", *texts)[0]) for phase, texts in TRAINER_SAYS.items()]
    samples = ("trainer: first samples", timeline.first("samples", "{")[0])
    step = ("trainer: first optimizer step", timeline.first("rows", "{")[0])
    return phases(began, [*said, samples, step])


def worker_phases(line: str) -> dict[str, float]:
    """What a worker says of its own start, which is part of the dispatcher's waiting.

    >>> worker_phases("INFO worker g-1 is ready after 9.0 s: 5.5 s importing, 3.0 s building")
    {'worker, of these: importing': 5.5, 'worker, of these: building': 3.0}
    """
    parts = line.partition(": ")[2]
    return {
        f"worker, of these: {what}": float(seconds)
        for seconds, what in re.findall(r"([\d.]+) s ([^,]+)", parts)
    }


def figures_of(runs: Mapping[str, Sequence[Started]]) -> list[Figure]:
    """What the file holds of the runs: times, then the ratio that another machine may compare."""
    figures = []
    for variant, repeats in runs.items():
        figures.append(
            median(f"{variant}, command to first optimizer step",
                   [run.seconds for run in repeats], "s", goal=GOAL_S)
        )  # fmt: skip
        in_all = [sum(run.cpu.values()) for run in repeats]
        figures.append(median(f"{variant}, CPU in all", in_all, "CPU s"))
        for part, of in (("", "phases"), ("CPU, ", "cpu")):
            unit = "s" if of == "phases" else "CPU s"
            for name in getattr(repeats[0], of):
                values = [getattr(run, of)[name] for run in repeats]
                figures.append(median(f"{variant}, {part}{name}", values, unit))
    if len(runs) > 1:
        serial, together = (runs[name] for name in VARIANTS[:2])
        ratios = [a.seconds / b.seconds for a, b in zip(together, serial, strict=True)]
        figures.append(median("at once / one by one", ratios, "x"))
    return figures


if __name__ == "__main__":
    main()
