"""This system and TRL on the same work, on this machine: throughput, cost, and time to a reward.

Same model, questions in the same order, samples a question, token limits, optimizer and loss (GRPO
with a mean over samples, float32, temperature 1). Ours runs as a user would run it, Ray and all,
with the default staleness of 1; TRL in each way that runs here, in its fastest setting
(`systems.py`). Both are watched from outside, in the same way (`watch.py`): the time at which a
step's row is seen, the CPU seconds and the memory of every process of the system.

    python -m benchmarks.end_to_end                                      # everything
    python -m benchmarks.end_to_end --settings "5M fixed with KL of 4" --systems "ours,trl ddp"
    python -m benchmarks.end_to_end --skip-rates --keep                  # adds to what is there

Rates leave out start-up, the first steps and the last two. Every run starts from nothing; systems
alternate. With `--keep` the runs of earlier calls count too: figures are made from all of them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from async_grpo.launch.interrupts import interrupt_once
from async_grpo.util.errors import AsyncGrpoError
from benchmarks import results
from benchmarks import stack as stacks
from benchmarks.alternation import turns
from benchmarks.end_to_end import measures, systems
from benchmarks.end_to_end.task import FORM, Setting, Task
from benchmarks.stack import MODEL

NAME = "end_to_end"
FOLDER = "runs/benchmarks/end_to_end"
SETTINGS = (
    "natural", "fixed", "natural with KL", "20M natural with KL", "20M fixed with KL",
)  # fmt: skip
logger = logging.getLogger(__name__)


@click.command()
@click.option("--systems", "names", default=",".join(systems.NAMES), help="to compare")
@click.option("--settings", default=",".join(SETTINGS), help=f"each of the form {FORM}")
@click.option("--repeats", default=2, help="runs of each system in each setting")
@click.option("--steps", default=14, help="gradient steps of such a run")
@click.option("--seeds", default=3, help="runs of each system to the reward threshold")
@click.option("--learners", default="ours,trl ddp", help="systems that run to the threshold")
@click.option("--most-steps", default=120, help="after which such a run gives up")
@click.option("--skip-rates", is_flag=True, help="only the time to the threshold")
@click.option("--skip-threshold", is_flag=True, help="only the rates")
@click.option("--keep", is_flag=True, help="count the runs of earlier calls too")
@click.option("--quick", is_flag=True, help="one short run of ours and of TRL, to show it works")
@click.option("--output-dir", default=FOLDER, help="logs, and the file of all runs")
@click.option("--results-dir", default=str(results.FOLDER), help="where the figures go")
def main(
    names: str,
    settings: str,
    repeats: int,
    steps: int,
    seeds: int,
    learners: str,
    most_steps: int,
    skip_rates: bool,
    skip_threshold: bool,
    keep: bool,
    quick: bool,
    output_dir: str,
    results_dir: str,
) -> None:
    """Compare this system with TRL."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s")
    logging.getLogger("async_grpo").setLevel("WARNING")
    interrupt_once()  # so that SIGTERM too ends what was started
    if quick:
        names, settings, repeats, steps, skip_threshold = "ours,trl", "natural", 1, 8, True
    folder = Path(output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    records = Records(folder / "runs.jsonl", keep=keep)
    click.echo(f"{results.machine()}, {results.load()}\n{systems.NOT_RUN}")
    if not skip_rates:
        compare_rates(
            records,
            names=names.split(","),
            settings=settings.split(","),
            repeats=repeats,
            steps=steps,
            folder=folder,
        )
    if not skip_threshold:
        compare_learning(
            records, names=learners.split(","), seeds=seeds, most_steps=most_steps, folder=folder
        )
    figures = measures.figures_of(records.read())
    click.echo(results.show(figures))
    path = results.write(NAME, figures, folder=Path(results_dir))
    click.echo(f"{shares(records.read())}\nwrote {path}, {results.load()}")


class Records:
    """The outcomes of all runs, a line each."""

    def __init__(self, file: Path, *, keep: bool) -> None:
        self._file = file
        if not keep:
            file.unlink(missing_ok=True)

    def add(self, record: Mapping[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def read(self) -> list[dict[str, Any]]:
        text = self._file.read_text() if self._file.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def next_turn(self, kind: str, setting: str, *, names: Sequence[str]) -> int:
        """One more than the last turn of any of these systems: turns of several calls differ."""
        taken = [
            record["turn"]
            for record in self.read()
            if (record["kind"], record["setting"]) == (kind, setting) and record["system"] in names
        ]
        return max(taken, default=-1) + 1


def compare_rates(
    records: Records,
    *,
    names: Sequence[str],
    settings: Sequence[str],
    repeats: int,
    steps: int,
    folder: Path,
) -> None:
    """Runs of a few steps in each setting, systems in turns."""
    questions = stacks.write_puzzles(folder / "puzzles.jsonl", seed=0)
    for setting in settings:
        try:
            task = Setting.read(setting).task(folder, questions=questions, num_steps=steps)
        except ValueError as error:
            raise click.BadParameter(f"--settings: {error}") from error
        first_turn = records.next_turn("rates", setting, names=names)
        for number, name in enumerate(turns(list(names), repeats=repeats)):
            run = attempt(name, task, folder=folder / slug(name, setting), until=never)
            if run is None:
                continue
            found = measures.rates(run)
            turn = first_turn + number // len(names)
            records.add(measures.as_record("rates", name, setting, turn, found))
            logger.info("%s, %s: %.1f samples/s, %.2f of the cores busy, %.0f CPU-ms a sample",
                        setting, name, found.samples_per_s, found.busy_cores,
                        found.cpu_ms_per_sample)  # fmt: skip


def compare_learning(
    records: Records, *, names: Sequence[str], seeds: int, most_steps: int, folder: Path
) -> None:
    """Runs to the reward threshold, systems in turns; a turn is a seed."""
    first_seed = records.next_turn("learned", "threshold", names=names)
    for number, name in enumerate(turns(list(names), repeats=seeds)):
        seed = first_seed + number // len(names)
        questions = stacks.write_puzzles(folder / f"puzzles-{seed}.jsonl", seed=seed)
        task = Task(str(MODEL), str(questions), num_steps=most_steps, seed=seed)
        where = folder / slug(name, f"seed {seed}")
        run = attempt(name, task, folder=where, until=measures.has_learned)
        if run is None:
            continue
        found = measures.learned(run)
        records.add(measures.as_record("learned", name, "threshold", seed, found))
        logger.info("seed %d, %s: %s", seed, name, found)


def attempt(
    name: str, task: Task, *, folder: Path, until: Callable[[Sequence[systems.Step]], bool]
) -> systems.Run | None:
    """A run; None when TRL failed, which is said. Our own failure ends the benchmark."""
    try:
        return systems.run(name, task, folder=folder, until=until)
    except AsyncGrpoError as error:
        if name == systems.OURS:
            raise
        logger.error("%s did not run, its figures are missing: %s", name, error)
        return None


def never(_: Sequence[object]) -> bool:
    """Runs of a fixed number of steps end by themselves."""
    return False


def shares(records: Sequence[Mapping[str, Any]]) -> str:
    """CPU seconds a step of each of our roles, in the latest run of every setting."""
    latest = {r["setting"]: r for r in records if r["system"] == systems.OURS and "steps" not in r}
    rows = [
        (f"{setting}: {role}", f"{seconds:.3f}")
        for setting, record in latest.items()
        for role, seconds in sorted(record["cpu_s_per_step"].items(), key=lambda item: -item[1])
        if seconds >= 0.001
    ]
    return results.table(("our CPU time by process", "s/step"), rows)


def slug(name: str, setting: str) -> str:
    """A folder's name.

    >>> slug("trl ddp", "natural with KL")
    'natural-with-KL-trl-ddp'
    """
    return f"{setting} {name}".replace(" ", "-")


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
