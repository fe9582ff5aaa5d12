"""Plans beside real runs on this machine: memory of each role, and seconds of a gradient step.

Two runs are measured first; each of six others, of another batch, staleness, length, number of
ranks or with a reference model, is planned from these and then run. Memory is the most that each
role's processes held, without shared memory; `--output-dir` keeps the runs, and what it holds is
not run again. Other programs on the same cores make steps longer than any plan: see the load.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from async_grpo.cli.launch_file import launch
from async_grpo.cli.local_run import options_of_run, read_run
from async_grpo.cli.plan import plan_of
from async_grpo.planning.bills import bills_of
from async_grpo.planning.measured import FIRST_ROW
from async_grpo.planning.page import Plan
from async_grpo.util.run_folder import METRICS_FILE
from benchmarks import procfs, results, stack
from benchmarks.cores import family
from benchmarks.processes import Process
from benchmarks.results import Figure

NAME = "plan_truth"
MEMORY_GOAL, STEP_GOAL = 0.15, 0.25
POLL_INTERVAL_S = 1.0
MEMORY_FILE = "memory.json"
ROLES = {  # what a process calls itself: its role in the plan
    "ray::GenerationWorker": "generation worker", "VLLM::EngineCore": "generation worker",
    "ray::LogprobWorker": "reference worker", "ray::Controller": "controller",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One run; what is not said is as in the first."""

    name: str
    ranks: int = 1
    batch_size: int = 16
    samples: int = 8
    max_staleness: int = 1
    steps_per_batch: int = 1
    with_reference: bool = False
    max_tokens: int = 4096
    model: Path = stack.MODEL

    def toml(self, folder: Path, puzzles: Path) -> str:
        """The run's file."""
        worker = f'[[worker]]\nmodel_path = "{self.model}"\nmax_model_len = 256\n'
        reference = f'{worker}mode = "logprob"\nmax_tokens_per_gpu = {self.max_tokens}\n'
        return f"""\
[launch]
num_cpus = 8
{worker}mode = "generation"
max_num_seqs = 128
reward_fns = "benchmarks/rewards.py:scattered"
global_num_verifiers = 1
{reference if self.with_reference else ""}[train]
nproc_per_node = {self.ranks}
model_name_or_path = "{self.model}"
data_path = "{puzzles}"
output_dir = "{folder / self.name}"
overwrite = true
num_training_batches = 12
batch_size = {self.batch_size}
train_minibatch_size = {self.batch_size // self.steps_per_batch}
samples_per_question = {self.samples}
max_generation_tokens = 64
max_tokens_per_gpu = {self.max_tokens}
max_staleness = {self.max_staleness}
learning_rate = 0.0
lr_scheduler = "constant"
kl_coefficient = {0.001 if self.with_reference else 0.0}
checkpoint_every_batches = 0
checkpoint_every_minutes = 0
trackers = ""
"""


KNOWN = (Case("known"), Case("known_on_policy", max_staleness=0, with_reference=True))
CASES = (
    Case("twice_the_batch", batch_size=32),
    Case("on_policy", batch_size=24, max_staleness=0),
    Case("two_steps", batch_size=32, steps_per_batch=2),
    Case("with_reference", batch_size=24, with_reference=True),
    Case("two_ranks", ranks=2, batch_size=32),
    Case("small_minibatches", samples=16, max_tokens=2048, max_staleness=2),
)


@click.command()
@click.option("--only", default="", help="comma-separated names of the planned runs; empty: all")
@click.option("--quick", is_flag=True, help="one planned run, to show that all of it runs")
@click.option("--output-dir", default="runs/benchmarks/plan_truth", help="of runs, which are kept")
@click.option("--results-dir", default=str(results.FOLDER), help="where plan_truth.json goes")
def main(only: str, quick: bool, output_dir: str, results_dir: str) -> None:
    """Compare plans with runs."""
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    click.echo(f"{results.machine()}, {results.load()}")
    puzzles = folder / "puzzles.jsonl"
    if not puzzles.exists():
        stack.write_puzzles(puzzles, seed=0)
    cases = [case for case in CASES if not only or case.name in only.split(",")][
        : 1 if quick else None
    ]
    for case in (*KNOWN, *cases):
        carry_out(case, folder, puzzles)
    figures = [figure for case in cases for figure in compare(case, folder)]
    click.echo(results.show(figures))
    num_ratios = sum(each.goal is not None for each in figures)
    click.echo(f"{within(figures)} of {num_ratios} ratios are within their goals")
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}, {results.load()}")


def carry_out(case: Case, folder: Path, puzzles: Path) -> None:
    """Run a case, unless it is there."""
    own = folder / case.name
    if (own / MEMORY_FILE).exists():
        return
    file = folder / f"{case.name}.toml"
    file.write_text(case.toml(folder, puzzles))
    command = [sys.executable, "-m", "async_grpo.cli.main", "launch", str(file)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = folder / f"{case.name}.log"
    process = Process("launch", command, log=log, environment=environment)
    with process:
        watcher = _Watcher(process.pid)
        watcher.start()
        try:
            process.wait()
        finally:
            watcher.ended.set()
            watcher.join()
    (own / MEMORY_FILE).write_text(json.dumps(watcher.peaks))
    click.echo(f"{case.name}: {median(seconds_of(own)):.2f} s a step, {results.load()}")


class _Watcher(threading.Thread):
    """Notes the most that the processes of a role have held, each by itself."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="watcher", daemon=True)
        self.ended = threading.Event()
        self._pid = pid
        self._held: dict[str, dict[int, int]] = defaultdict(dict)

    @property
    def peaks(self) -> dict[str, int]:
        """{role: bytes of its processes together}."""
        return {role: sum(held.values()) for role, held in self._held.items()}

    def run(self) -> None:
        while not self.ended.wait(POLL_INTERVAL_S):
            for pid in family(self._pid):
                title, usage = procfs.command_line(pid), procfs.usage(pid)
                role = next((ROLES[each] for each in ROLES if title.startswith(each)), "")
                if role and usage is not None:
                    held = self._held[role]
                    held[pid] = max(held.get(pid, 0), usage.rss_bytes - usage.shared_bytes)


def rows_of(folder: Path) -> list[dict[str, float]]:
    """Lines of the measured steps."""
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()][
        FIRST_ROW:
    ]


def seconds_of(folder: Path) -> list[float]:
    return [row["seconds"] for row in rows_of(folder)]


def plan_case(case: Case, folder: Path) -> Plan:
    """From the known runs alone."""
    options = launch.make_context("launch", [str(folder / f"{case.name}.toml")]).params
    known = [str(folder / each.name) for each in KNOWN]
    return plan_of(read_run(**options_of_run(options)), from_run=known)


def compare(case: Case, folder: Path) -> list[Figure]:
    """Seconds of a step and memory of each role, planned by measured."""
    plan, own = plan_case(case, folder), folder / case.name
    planned = plan.found.as_asked  # not the best: what has been run
    assert planned is not None
    real = sum(seconds_of(own)) / len(seconds_of(own))
    figures = [
        Figure(f"{case.name}: step, measured", real, "s"),
        _ratio(f"{case.name}: step, planned by measured", planned.step_s / real, STEP_GOAL),
    ]
    held = json.loads((own / MEMORY_FILE).read_text())
    held["trainer rank"] = rows_of(own)[-1]["peak_process_bytes"]
    for role in bills_of(plan.asked, planned.split):
        if measured := held.get(role.role):
            ratio = role.bill.total * max(1, role.count * (role.role != "trainer rank")) / measured
            name = f"{case.name}: memory of the {role.role}, planned by measured"
            figures.append(_ratio(name, ratio, MEMORY_GOAL))
    return figures


def _ratio(name: str, ratio: float, goal: float) -> Figure:
    """Of a plan by the truth; its goal is how far from 1 it may be."""
    if ratio < 1:
        return Figure(name, ratio, "x", "higher", 1 - goal)
    return Figure(name, ratio, "x", goal=1 + goal)


def within(figures: Sequence[Figure]) -> int:
    """How many ratios are as near to 1 as they should be."""
    ratios = [each for each in figures if each.goal is not None]
    return sum(abs(each.value - 1) <= abs((each.goal or 1) - 1) for each in ratios)


if __name__ == "__main__":
    main()
