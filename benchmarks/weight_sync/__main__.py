"""Weight sync, measured: bytes a second, the pause that requests see, memory, work thrown away.

Every transport that runs without a GPU is measured, which is the staged one of the object store:
parameters are gathered and packed by the trainer, put into Ray's object store, copied by the worker
into memory that it shares with its engine, verified there while generation goes on, and loaded in
one step. NCCL needs NVIDIA devices and is only named.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import ray
import torch
import torch.distributed as dist

from async_grpo.launch.interrupts import interrupt_once
from benchmarks import results
from benchmarks.results import Figure
from benchmarks.stack import start
from benchmarks.weight_sync.figures import figures_of, show_phases
from benchmarks.weight_sync.models import SIZES
from benchmarks.weight_sync.run import run

NAME = "weight_sync"
QUICK = ("3M tied",)
NOT_RUN = {"nccl": "needs an NVIDIA device each for trainer and worker"}


@click.command()
@click.option("--quick", is_flag=True, help="the smallest model only, two updates")
@click.option("--repeats", default=4, help="updates of each model")
@click.option("--results-dir", default=str(results.FOLDER), help="where weight_sync.json goes")
def main(quick: bool, repeats: int, results_dir: str) -> None:
    """Measure updates of engines that serve."""
    interrupt_once()
    click.echo(f"{results.machine()}, {results.load()}")
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="weights-") as folder, start(Path(folder)) as stack:
        _join(stack.environment["RAY_ADDRESS"])
        try:
            for name in QUICK if quick else SIZES:
                click.echo(f"\nobject_store, {name}")
                syncs = run(stack, SIZES[name], repeats=2 if quick else repeats, report=click.echo)
                click.echo(show_phases(syncs))
                for problem in {sync.load.ack.canary_problem for sync in syncs} - {""}:
                    click.echo(problem)
                own = figures_of(f"object_store, {name}", syncs)
                click.echo(results.show(own))
                figures += own
        finally:
            dist.destroy_process_group()
            ray.shutdown()
    for transport, reason in NOT_RUN.items():
        click.echo(f"{transport}: not run, {reason}")
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}, {results.load()}")


def _join(address: str) -> None:
    """Of Ray and of a group of one rank."""
    torch.set_num_threads(1)
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


if __name__ == "__main__":
    main()
