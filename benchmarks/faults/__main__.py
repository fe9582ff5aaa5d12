"""Faults on real runs, measured: `python -m benchmarks.faults`.

Prints a line for every fault and a table, writes benchmarks/results/faults.json, and ends with 1
when a sample was lost or doubled, a process was left, or the run did not take a fault as it should.
"""

from __future__ import annotations

import itertools
import logging
import random
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from async_grpo.cli.interrupts import interrupt_once
from benchmarks import results
from benchmarks.faults import report
from benchmarks.faults.experiment import Outcome, books, commit, settled
from benchmarks.faults.live import LiveRun, Shape
from benchmarks.faults.plan import ROLES, Fault, matrix, random_kills

NAME = "faults"
logger = logging.getLogger(__name__)


@click.command()
@click.option("--roles", default="", help=f"comma-separated, of: {', '.join(ROLES)}; empty: all")
@click.option("--repeats", default=1, help="times that each fault is committed")
@click.option("--seed", default=0, help="of the victims, the moments, and the order of repeats")
@click.option("--minutes", default=0.0, help="instead: SIGKILLs of anybody, for so long")
@click.option("--scripted", is_flag=True, help="generation takes no time, and has no engine")
@click.option("--ranks", default=2, help="trainer ranks")
@click.option("--output-dir", default="runs/benchmarks/faults", help="replaced")
@click.option("--results-dir", default=str(results.FOLDER), help="where faults.json goes")
def main(
    roles: str,
    repeats: int,
    seed: int,
    minutes: float,
    scripted: bool,
    ranks: int,
    output_dir: str,
    results_dir: str,
) -> None:
    """Kill, freeze and slow every role of real runs, and see whether anything is lost."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s")
    logging.getLogger("async_grpo").setLevel("WARNING")
    interrupt_once()  # so that SIGTERM too ends what was started
    chosen = [role.strip() for role in roles.split(",") if role.strip()]
    unknown = set(chosen) - set(ROLES)
    if unknown:
        raise click.UsageError(f"--roles must be of {', '.join(ROLES)}, got {sorted(unknown)}")
    faults: Iterable[Fault] = matrix(chosen, repeats=repeats, seed=seed)
    if minutes:
        faults = _while_time_is_left(random_kills(seed, roles=chosen), minutes=minutes)
    click.echo(f"{results.machine()}, {results.load()}")
    shutil.rmtree(output_dir, ignore_errors=True)
    shape = Shape(num_ranks=ranks, seed=seed, is_scripted=scripted)
    outcomes, tallies = _all_runs(faults, Path(output_dir), shape)
    click.echo(f"\n{report.table(outcomes)}\n")
    figures = report.figures(outcomes, tallies)
    click.echo(results.show(figures))
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}, {results.load()}")
    sys.exit(not (all(map(report.is_well, outcomes)) and tallies.are_clean))


def _all_runs(
    faults: Iterable[Fault], folder: Path, shape: Shape
) -> tuple[list[Outcome], report.Tallies]:
    """One run bears one fault after the other; when it cannot go on, a fresh one takes over."""
    outcomes: list[Outcome] = []
    tallies = report.Tallies()
    generator = random.Random(shape.seed)
    left = iter(faults)
    for number in itertools.count():
        first = next(left, None)
        if first is None:
            return outcomes, tallies
        with LiveRun(folder / str(number), shape) as run:
            for fault in itertools.chain([first], left):
                settled(run)
                outcomes.append(commit(fault, run, generator=generator))
                logger.info("%s", report.line(outcomes[-1]))
                if outcomes[-1].recovered_s is None:
                    break
            tallies.add(books(run))
            code, orphans = run.stop()
            tallies.orphans += len(orphans)
            logger.info("run %d ended with %s, %d processes left", number, code, len(orphans))
    raise AssertionError("unreachable")


def _while_time_is_left(faults: Iterator[Fault], *, minutes: float) -> Iterator[Fault]:
    end = time.monotonic() + 60 * minutes
    return itertools.takewhile(lambda _: time.monotonic() < end, faults)


if __name__ == "__main__":
    main()
