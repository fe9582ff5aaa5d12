"""Runs the variants one after the other within a time limit: `python -m benchmarks.gpu`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks import results

# One rank needs no network, and a machine may have none.
SETTINGS = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
PARTS = ("numerics", "trainer", "heads", "attention")
LEAST_S = 5.0  # in which a variant can say something


@click.command()
@click.option("--quick", is_flag=True, help="toy sizes, also where there is a device")
@click.option("--parts", default=",".join(PARTS), help="comma-separated: what to measure")
@click.option("--time-limit-s", default=540.0, help="when to start and wait for nothing more")
@click.option("--compile/--no-compile", "compiles", default=None, help="default: full sizes only")
@click.option("--results-dir", default=str(results.FOLDER), help="where gpu.json goes")
def main(
    quick: bool, parts: str, time_limit_s: float, compiles: bool | None, results_dir: str
) -> None:
    """Measure the trainer on one NVIDIA device; toy sizes of the same where there is none."""
    deadline = time.monotonic() + time_limit_s
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from benchmarks.gpu import clock, isolation, plan, sheet  # torch reads the environment

    device = isolation.ask(clock.device_name)
    toy = quick or not device
    compiles = not toy if compiles is None else compiles
    page = sheet.Sheet(Path(results_dir), device=device, toy=toy)
    for trial in plan.trials(_chosen(parts), toy=toy, compiles=compiles):
        left = deadline - time.monotonic()
        if left < LEAST_S:
            page.leave_out(trial.name)
        else:
            page.fill(trial.name, isolation.run(trial, limit_s=left))
    page.close()


def _chosen(parts: str) -> Sequence[str]:
    chosen = [part.strip() for part in parts.split(",")]
    unknown = sorted(set(chosen) - set(PARTS))
    if unknown:
        raise click.BadParameter(f"parts must be among {', '.join(PARTS)}, got {unknown}")
    return chosen


if __name__ == "__main__":
    main()
