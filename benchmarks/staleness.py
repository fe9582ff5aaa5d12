"""What asynchrony buys: generator and trainer on one core each, the same work at several bounds.

Runs alternate within one session, so that all of them meet the same machine. Where generator and
trainer compute g and t seconds a batch, doing one after the other takes g + t, and no overlap
brings it below max(g, t). Even lengths: every output is as long as allowed. Natural: the tiny model
ends its outputs itself. Scripted: the same comparison with given durations on a virtual clock,
where the machine has no say. The control plane (Ray, batcher, verifiers) needs the same two cores:
how busy both are says what is left.
"""

from __future__ import annotations

import logging
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from async_grpo.launch.interrupts import interrupt_once
from benchmarks import results, stack
from benchmarks.results import Figure, median
from benchmarks.scripted_staleness import scripted_figures
from benchmarks.two_cores import FIRST_ROW, Measured, Work, even_lengths, run_work

NAME = "staleness"
REWARD = "benchmarks/rewards.py:scattered"
# Full-length outputs are five times the natural ones: half as many take about as long.
WORK = {"even": Work(batch_size=16), "natural": Work(batch_size=32)}
logger = logging.getLogger(__name__)

Runs = Mapping[int, Sequence[Measured]]  # by staleness bound, one a repeat


@click.command()
@click.option("--staleness", default="0,1,2", help="bounds to compare; must hold 0")
@click.option("--repeats", default=2, help="runs of each bound and kind of lengths")
@click.option("--batches", default=12, help="batches a run")
@click.option("--lengths", default="even,natural", help="kinds of lengths, of: even, natural")
@click.option("--quick", is_flag=True, help="two short runs, to show that all of it runs")
@click.option("--output-dir", default="runs/benchmarks/staleness", help="replaced")
@click.option("--results-dir", default=str(results.FOLDER), help="where staleness.json goes")
def main(
    staleness: str, repeats: int, batches: int, lengths: str, quick: bool, output_dir: str,
    results_dir: str,
) -> None:  # fmt: skip
    """Compare staleness bounds on two cores: scripted, then with the real stack."""
    if quick:
        staleness, repeats, batches, lengths = "0,1", 1, FIRST_ROW + 3, "natural"
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s")
    logging.getLogger("async_grpo").setLevel("WARNING")
    interrupt_once()  # so that SIGTERM too ends what was started
    bounds = [int(part) for part in staleness.split(",")]
    least = FIRST_ROW + max(bounds) + 2
    if 0 not in bounds or batches < least:
        raise click.UsageError(f"--staleness must hold 0, --batches be at least {least}")
    shutil.rmtree(output_dir, ignore_errors=True)
    click.echo(f"{results.machine()}, {results.load()}")
    figures = scripted_figures()
    with stack.start(Path(output_dir)) as running:
        puzzles = stack.write_puzzles(running.folder / "puzzles.jsonl", seed=0)
        for kind in lengths.split(","):
            runs = _compare(running, puzzles, kind, bounds, repeats=repeats, batches=batches)
            click.echo(f"\n{kind} lengths\n{show(runs)}")
            figures += figures_of(kind, runs)
    click.echo(f"\n{results.show(figures)}")
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}, {results.load()}")


def _compare(
    running: stack.Stack,
    puzzles: Path,
    kind: str,
    bounds: Sequence[int],
    *,
    repeats: int,
    batches: int,
) -> Runs:
    model = even_lengths(running.folder / "even-model") if kind == "even" else stack.MODEL
    work = Work(WORK[kind].batch_size, num_batches=batches)
    runs: dict[int, list[Measured]] = {bound: [] for bound in bounds}
    with stack.generation_worker(running, model, reward=REWARD, log=kind) as worker:
        for repeat in range(repeats):
            order = [*bounds[repeat % len(bounds) :], *bounds[: repeat % len(bounds)]]
            for bound in order:
                name = f"{kind}-S{bound}-{repeat}"
                measured = run_work(
                    running, model, puzzles, name=name, work=work, max_staleness=bound,
                    worker=worker,
                )  # fmt: skip
                runs[bound].append(measured)
                logger.info("%s: %.2f s a batch, %s", name, measured.wall, results.load())
    return runs


def figures_of(kind: str, runs: Runs) -> list[Figure]:
    """What the file holds of one kind of lengths."""
    g = statistics.median(run.generator for run in runs[0])
    t = statistics.median(run.trainer for run in runs[0])
    figures = [
        Figure(f"{kind}, generating (g) at staleness 0", g, "s/batch"),
        Figure(f"{kind}, training (t) at staleness 0", t, "s/batch"),
        Figure(f"{kind}, bound max(g, t) / (g + t)", max(g, t) / (g + t), "fraction"),
    ]
    for bound, repeats in runs.items():
        at = f"{kind}, staleness {bound}"
        walls = [run.wall for run in repeats]
        figures += [
            median(f"{at}, wall time", walls, "s/batch"),
            median(f"{at}, wall time / (g + t)", [wall / (g + t) for wall in walls], "fraction"),
            median(f"{at}, bound / wall", [max(g, t) / wall for wall in walls], "fraction",
                   better="higher"),
            median(f"{at}, generator idle", [run.generator_idle for run in repeats], "fraction"),
            median(f"{at}, trainer idle", [run.trainer_idle for run in repeats], "fraction"),
            median(f"{at}, both cores busy", [run.both_busy for run in repeats], "fraction",
                   better="higher"),
            median(f"{at}, services", [run.services for run in repeats], "CPU s/batch"),
        ]  # fmt: skip
        if bound:
            pairs = zip(repeats, runs[0], strict=True)
            ratios = [run.wall / serial.wall for run, serial in pairs]
            figures.append(median(f"{at}, wall time / staleness 0's", ratios, "fraction"))
    return figures


def show(runs: Runs) -> str:
    """Every run, with what explains its time."""
    header = (
        "run", "s/batch", "generator CPU", "queued", "idle", "trainer CPU", "queued", "idle",
        "services CPU", "controller", "verifiers", "publishing", "tokens", "lag",
    )  # fmt: skip
    rows = [
        (
            f"S={bound} #{number}", f"{run.wall:.2f}",
            f"{run.generator:.2f}", f"{run.generator_queued:.2f}", f"{run.generator_idle:.0%}",
            f"{run.trainer:.2f}", f"{run.trainer_queued:.2f}", f"{run.trainer_idle:.0%}",
            f"{run.services:.2f}", f"{run.controller:.2f}", f"{run.verifiers:.2f}",
            f"{run.publishing:.3f}", f"{run.output_tokens:.0f}",
            f"{run.max_lag}",
        )
        for number in range(max(map(len, runs.values())))
        for bound, run in ((bound, repeats[number]) for bound, repeats in runs.items())
    ]  # fmt: skip
    return results.table(header, rows)


if __name__ == "__main__":
    main()
