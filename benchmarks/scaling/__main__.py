"""Scale on paper: `python -m benchmarks.scaling`; see docs/scaling.md.

The service is simulated at 8 to 10,000 devices. Its figures are the same in every run: time is the
simulation's own, seeds are fixed.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
import numpy as np

from async_grpo.planning.service import Scenario, mean, simulate
from benchmarks import results
from benchmarks.results import Figure
from benchmarks.scaling import hardware
from benchmarks.scaling.hardware import DEVICES_A_NODE, MODELS, control_costs
from benchmarks.scripted_staleness import heavy_tail

NAME = "scaling"
BOUNDS = (0, 1, 2, 4)
SPLITS = (0.8, 1.0, 1.2, 1.4)  # of the engines that an even flow asks for, tried at staleness 1
SEARCHED = 512  # devices up to which splits are tried; above, the even flow decides
PLACES_HELD = 0.45  # share of an engine's places that hold a sequence, where the search begins
SHARE = "share of the time"  # which a smaller or larger one is not worse for: not guarded
# By devices: questions a batch, samples a question, batches measured, batches before.
SIZES = {8: (64, 8, 24, 3), 64: (512, 8, 10, 2), 512: (1024, 16, 4, 2), 10_000: (4096, 16, 2, 1)}
CLUSTERS = (
    ("1.5B", 8), ("7B", 8), ("7B", 64), ("32B", 64), ("7B", 512), ("70B", 512), ("7B", 10_000),
    ("70B", 10_000),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One simulated run: means over its measured batches."""

    engines: int
    samples_per_s: float
    tokens_per_s: float
    shares: dict[str, float]


@click.command()
@click.option("--quick", is_flag=True, help="the two smallest clusters, staleness 0 and 1")
@click.option("--jobs", default=os.cpu_count() or 1, help="simulations at a time")
@click.option("--results-dir", default=str(results.FOLDER), help="where scaling.json goes")
def main(quick: bool, jobs: int, results_dir: str) -> None:
    """Simulate the service at scale."""
    click.echo(f"{results.machine()}, {results.load()}; times are those of the simulation")
    bounds, figures = (BOUNDS[:2] if quick else BOUNDS), list[Figure]()
    with ProcessPoolExecutor(jobs) as pool:
        for name, devices in CLUSTERS[:2] if quick else CLUSTERS:
            tried = pool.map(run, [(name, devices, n, 1) for n in splits(name, devices)])
            engines = max(tried, key=lambda row: row.samples_per_s).engines
            rows = pool.map(run, [(name, devices, engines, bound) for bound in bounds])
            figures += show(name, devices, dict(zip(bounds, rows, strict=True)))
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}")


def scenario_of(name: str, devices: int, engines: int, max_staleness: int) -> Scenario:
    """With this many engines, everything else training."""
    model, (batch_size, samples, measured, warm_up) = MODELS[name], SIZES[devices]
    generating = engines * model.devices_per_engine
    return Scenario(
        engine=hardware.engine_rates(model),
        trainer=hardware.trainer_rates(model),
        sync=hardware.sync_rates(
            model, num_ranks=devices - generating, engine_nodes=-(-generating // DEVICES_A_NODE)
        ),
        control=control_costs(),
        lengths=heavy_tail,
        num_engines=engines,
        num_ranks=devices - generating,
        # The first are not measured, nor the last ones: nothing is generated behind them any more.
        num_batches=warm_up + measured + 2 * max_staleness + 1,
        batch_size=batch_size,
        samples_per_question=samples,
        max_staleness=max_staleness,
    )


def run(asked: tuple[str, int, int, int]) -> Row:
    """Simulate a model on devices with engines at a staleness; what measured batches were like."""
    _, devices, engines, max_staleness = asked
    scenario = scenario_of(*asked)
    _, _, measured, warm_up = SIZES[devices]
    first = warm_up + max_staleness
    steps = simulate(scenario, num_steps=first + measured)[first:]
    seconds = mean(steps, lambda step: step.seconds)

    def share(part: str, by: float = 1.0) -> float:
        return mean(steps, lambda step: float(getattr(step, part))) / seconds / by

    busy, gathering, blocked = share("busy_s"), share("gathering_s"), share("blocked_s")
    return Row(
        engines,
        samples_per_s=mean(steps, lambda step: step.num_samples) / seconds,
        tokens_per_s=mean(steps, lambda step: step.num_tokens) / seconds,
        shares={
            "places filled": share("sequence_s", engines * scenario.engine.capacity),
            "engines stalled": share("engines_stalled_s", engines),
            "trainers busy": busy,
            "idle": 1 - busy - gathering - blocked - scenario.trainer.step_s / seconds,
            "standing still for weights": gathering,
            "waiting for the sync": blocked,
            "weights on their way": scenario.sync.transfer_s / seconds,
            "control process": share("control_s"),
        },
    )


@cache
def lengths() -> tuple[float, float]:
    """Mean output tokens, and mean of their squares."""
    drawn = heavy_tail(np.random.default_rng(0), 20_000).astype(float)
    return float(drawn.mean()), float((drawn**2).mean())


def splits(name: str, devices: int) -> list[int]:
    """Numbers of engines that are worth a try, around that of an even flow."""
    most = (devices - 1) // MODELS[name].devices_per_engine
    flow = min(range(1, most + 1), key=lambda n: max(batch_seconds(name, devices, n)))
    if devices > SEARCHED:
        return [flow]
    return sorted({min(max(round(flow * part), 1), most) for part in SPLITS})


def batch_seconds(name: str, devices: int, engines: int) -> tuple[float, float]:
    """Of generating and of training one batch at staleness 1, were nothing to vary."""
    scenario = scenario_of(name, devices, engines, 1)
    (mean_length, square), num = lengths(), scenario.batch_size * scenario.samples_per_question
    running = max(1.0, min(PLACES_HELD * scenario.engine.capacity, 1.5 * num / engines))
    context = scenario.prompt_tokens + square / mean_length / 2
    step_s = scenario.engine.seconds_a_step(int(running), running * context)
    cost = mean_length + scenario.prompt_tokens + square / scenario.trainer.attention_ratio
    training = num * cost / scenario.trainer.cost_per_second / scenario.num_ranks
    return num * mean_length * step_s / (engines * running), training + scenario.sync.gather_s


def show(name: str, devices: int, rows: dict[int, Row]) -> list[Figure]:
    """One cluster on the screen, and its figures."""
    at, engines = f"{name} on {devices:,} devices", rows[0].engines
    header = ("staleness", "samples/s", "tokens/s/device", *rows[0].shares)
    lines = [
        (
            str(bound),
            f"{row.samples_per_s:.1f}",
            f"{row.tokens_per_s / devices:,.0f}",
            *(f"{share:.1%}" for share in row.shares.values()),
        )
        for bound, row in rows.items()
    ]
    click.echo(f"\n{at}: {engines} engines\n{results.table(header, lines)}")
    best = max(row.samples_per_s for row in rows.values())
    figures = [Figure(f"{at}, engines", engines, "engines")]
    for bound, row in rows.items():
        own, ratio = f"{at}, staleness {bound}", row.samples_per_s / best
        figures += [
            Figure(f"{own}, samples", row.samples_per_s, "samples/s", "higher"),
            Figure(f"{own}, tokens", row.tokens_per_s, "tokens/s", "higher"),
            Figure(f"{own}, samples / best staleness's", ratio, "x", "higher"),
            *(Figure(f"{own}, {part}", share, SHARE) for part, share in row.shares.items()),
        ]
    return figures


if __name__ == "__main__":
    main()
