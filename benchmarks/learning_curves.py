"""Learning curves of the quick start's task at several staleness bounds, over wall clock.

Generator and trainer have a core each; bounds alternate, seed by seed. With --passes, numbers of
passes over a batch are compared instead, at equal samples and staleness 1.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from async_grpo.launch.interrupts import interrupt_once
from async_grpo.viewing.curves import Run, make_curves
from async_grpo.viewing.figure import save_figure
from benchmarks import results
from benchmarks import stack as stacks
from benchmarks.processes import Process
from benchmarks.results import Figure, median
from benchmarks.stack import MODEL, Stack
from benchmarks.two_cores import read_rows

NAME = "learning_curves"
PICTURE = "docs/staleness.svg"
THRESHOLD = 0.8
SMOOTHED_BATCHES = 5  # the reward of one batch is too noisy to say when a threshold is reached
FINAL_BATCHES = 10
WALL_CLOCK = "Wall clock (seconds)"


@dataclass(frozen=True, slots=True)
class Learned:
    """What one run reached."""

    final_reward: float  # mean of the last batches
    threshold: tuple[int, float] | None  # batches and seconds it took; None: not reached
    seconds: float  # from the first request to the last gradient step


# The rows of batches, by what is compared, such as `staleness 1`, then by seed.
Curves = Mapping[str, Sequence[Sequence[dict[str, Any]]]]
logger = logging.getLogger(__name__)


@click.command()
@click.option("--staleness", default="0,1", help="bounds to compare; the first is the baseline")
@click.option("--passes", default="", help="numbers of passes to compare instead, such as 1,2")
@click.option("--seeds", default=3, help="runs of each bound")
@click.option("--batches", default=60, help="batches a run")
@click.option("--quick", is_flag=True, help="a few batches from one seed")
@click.option(
    "--picture",
    default="",
    help="where the curves are drawn",
    show_default=f"{PICTURE}; the output folder, of passes and with --quick",
)
@click.option("--output-dir", default="runs/benchmarks/learning_curves", help="replaced")
@click.option("--results-dir", default=str(results.FOLDER), help="where the figures go")
def main(
    staleness: str, passes: str, seeds: int, batches: int, quick: bool, picture: str,
    output_dir: str, results_dir: str,
) -> None:  # fmt: skip
    """Learn the quick start's task at each staleness bound, from several seeds."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s")
    logging.getLogger("async_grpo").setLevel("WARNING")
    interrupt_once()  # so that SIGTERM too ends what was started
    if quick:
        seeds, batches = 1, 6
    picture = picture or (f"{output_dir}/curves.svg" if quick or passes else PICTURE)
    compared: dict[str, dict[str, object]] = {
        f"staleness {bound}": {"max_staleness": bound} for bound in staleness.split(",")
    }
    if passes:
        compared = {f"passes {n}": {"num_passes": n} for n in passes.split(",")}
    curves: dict[str, list[list[dict[str, Any]]]] = {label: [] for label in compared}
    shutil.rmtree(output_dir, ignore_errors=True)
    click.echo(f"{results.machine()}, {results.load()}")
    with (
        stacks.start(Path(output_dir)) as stack,
        stacks.generation_worker(stack, MODEL, reward="countdown", log="generation") as worker,
    ):
        for seed in range(seeds):
            for label, options in compared.items():
                rows = run_curve(
                    stack, options | {"num_training_batches": batches}, seed=seed, worker=worker
                )
                curves[label].append(rows)
                logger.info("%s, seed %d: %s", label, seed, learned(rows))
    figures = figures_of(curves)
    click.echo(results.show(figures))
    draw(curves, Path(picture))
    name = f"{NAME}_of_passes" if passes else NAME
    path = results.write(name, figures, folder=Path(results_dir))
    click.echo(f"wrote {picture} and {path}, {results.load()}")


def run_curve(
    stack: Stack, options: Mapping[str, object], *, seed: int, worker: Process
) -> list[dict[str, Any]]:
    """The metrics of each batch's first step in one run, with its wall clock."""
    name = "-".join(["curve", *(f"{key}={value}" for key, value in options.items()), str(seed)])
    puzzles = stacks.write_puzzles(stack.folder / f"puzzles-{seed}.jsonl", seed=seed)
    options = options | {
        "data_path": puzzles,
        "batch_size": 32,
        "samples_per_question": 8,
        "learning_rate": 3e-4,
        "infinite_sampler_seed": seed,
    }
    output = stack.folder / name
    with stacks.trainer(stack, MODEL, output=output, options=options) as process:
        process.wait(watched=[worker])
    rows = with_wall_clock(read_rows(output / "training_metrics.jsonl"))
    return [row for row in rows if row["pass_number"] == 1]


def with_wall_clock(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with the seconds from the first request to its gradient step."""
    elapsed = np.cumsum([row["seconds"] for row in rows])
    return [{**row, WALL_CLOCK: float(now)} for row, now in zip(rows, elapsed, strict=True)]


def learned(rows: Sequence[Mapping[str, Any]], *, threshold: float = THRESHOLD) -> Learned:
    """Final reward, and when the mean of SMOOTHED_BATCHES batches first reached the threshold."""
    rewards = np.array([row["avg_reward"] for row in rows])
    sums = np.concatenate(([0.0], np.cumsum(rewards)))
    # Of a batch and those before it, known when it ends: means[n] ends with batch n + window - 1.
    window = min(SMOOTHED_BATCHES, len(rows))
    means = (sums[window:] - sums[:-window]) / window
    reached = np.flatnonzero(means >= threshold)
    last = int(reached[0]) + window - 1 if len(reached) else None
    return Learned(
        final_reward=float(rewards[-FINAL_BATCHES:].mean()),
        threshold=None if last is None else (last + 1, rows[last][WALL_CLOCK]),
        seconds=rows[-1][WALL_CLOCK],
    )


def figures_of(curves: Curves) -> list[Figure]:
    """What the file holds; where a seed missed the threshold there are no times to it."""
    ends = {label: [learned(rows) for rows in seeds] for label, seeds in curves.items()}
    baseline, *_ = ends
    figures = []
    to = f"to reward {THRESHOLD}"
    for at, seeds in ends.items():
        rewards, times = [end.final_reward for end in seeds], [end.seconds for end in seeds]
        figures += [
            median(f"{at}, final reward", rewards, "reward", better="higher"),
            median(f"{at}, wall time", times, "s"),
        ]
        reached = [end.threshold for end in seeds if end.threshold]
        before = [end.threshold for end in ends[baseline] if end.threshold]
        if len(reached) == len(seeds):
            figures += [
                median(f"{at}, {to}", [float(batches) for batches, _ in reached], "batches"),
                median(f"{at}, {to}", [seconds for _, seconds in reached], "s"),
            ]
        if at != baseline and len(reached) == len(before) == len(seeds):
            pairs = zip(reached, before, strict=True)
            ratios = [own / other for (_, own), (_, other) in pairs]
            figures.append(median(f"{at}, time {to} / {baseline}'s", ratios, "fraction"))
    return figures


def draw(curves: Curves, picture: Path) -> None:
    """Mean reward over wall clock: a line for all that is compared, its band from seed to seed."""
    runs = [
        Run(name=label, source=f"seed {number}", rows=rows)
        for label, seeds in curves.items()
        for number, rows in enumerate(seeds)
    ]
    drawn = make_curves(runs, x=WALL_CLOCK, y="avg_reward", smooth_window=SMOOTHED_BATCHES)
    save_figure({"avg_reward": drawn}, picture, x=WALL_CLOCK)


if __name__ == "__main__":
    main()
