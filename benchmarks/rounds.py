"""When a round of minibatches goes out, against two simpler rules, with scripted latencies.

`whole batch` sends when the step's samples are complete, `whatever there is` whenever a trainer
asks and anything is ready; `ours` is the batcher's own rule with its defaults. All three meet the
same samples on the same virtual clock: eight ranks of 8,000 tokens/s, 512 sequences at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from async_grpo.batching.rounds import RoundFormer
from benchmarks import results
from benchmarks.results import Figure, median
from benchmarks.scripted_run import Script, Step, simulate

NAME = "rounds"
LONGEST = 16_384
GOAL_FIRST_BACKWARD_S = 3.0  # the batcher's patience, and a second of polls and of verification
GOAL_FILL = 0.9
GOAL_STEP_TIME = 1.02  # by the better of the other two rules


def even(_rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Every output is as long as the next."""
    return np.full(count, 2_000)


def heavy_tail(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Lognormal, median 1,500 tokens, cut at LONGEST: reasoning runs."""
    return np.clip(rng.lognormal(np.log(1_500), 1.0, count), 16, LONGEST).astype(np.int64)


SCRIPTS = {
    "even lengths": Script(lengths=even, seconds_per_token=0.02),
    "heavy tail": Script(lengths=heavy_tail, seconds_per_token=0.02),
    "fast generator": Script(lengths=heavy_tail, seconds_per_token=0.0005),
}


def ours(script: Script) -> RoundFormer:
    return RoundFormer(script.num_ranks, max_tokens=script.max_tokens, steps_per_batch=1)


def whole_batch(script: Script) -> RoundFormer:
    return RoundFormer(
        script.num_ranks, max_tokens=script.max_tokens, steps_per_batch=1, deterministic=True
    )


def whatever_there_is(script: Script) -> RoundFormer:
    return RoundFormer(
        script.num_ranks, max_tokens=script.max_tokens, steps_per_batch=1, fill_target=1e-12
    )


POLICIES: Mapping[str, Callable[[Script], RoundFormer]] = {
    "ours": ours,
    "whole batch": whole_batch,
    "whatever there is": whatever_there_is,
}


@click.command()
@click.option("--seeds", default=3, help="scripts of each kind")
@click.option("--batches", default=4, help="batches of each script")
@click.option("--results-dir", default=str(results.FOLDER), help="where rounds.json goes")
def main(seeds: int, batches: int, results_dir: str) -> None:
    """Compare rules for sending rounds."""
    click.echo(f"{results.machine()}, {results.load()}; times are those of the script")
    figures: list[Figure] = []
    for max_staleness in (0, 1):
        for kind, script in SCRIPTS.items():
            script = dataclasses.replace(script, max_staleness=max_staleness, num_batches=batches)
            figures += compare(f"{kind}, staleness {max_staleness}", script, seeds=seeds)
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}")


def compare(title: str, script: Script, *, seeds: int) -> list[Figure]:
    """One table on the screen, and its figures."""
    runs = {
        policy: [simulate(dataclasses.replace(script, seed=seed), former) for seed in range(seeds)]
        for policy, former in POLICIES.items()
    }
    header = ("rule", "first sample to first backward", "step", "trainer busy", "fill", "rounds")
    rows, figures = [], []
    for policy, seen in runs.items():
        own = _figures(title, policy, [step for steps in seen for step in steps])
        rows.append((policy, *(f"{figure.value:.3g} {figure.unit}" for figure in own)))
        figures += own
    figures.append(_ratio(title, runs))
    click.echo(f"\n{title}\n{results.table(header, rows)}")
    click.echo(f"{figures[-1].name}: {figures[-1].value:.3f}, goal {GOAL_STEP_TIME}")
    return figures


def _figures(title: str, policy: str, steps: Sequence[Step]) -> list[Figure]:
    at, is_ours = f"{title}, {policy}", policy == "ours"
    # With staleness a batch may be ready before the trainer is done with the one before.
    start_goal = GOAL_FIRST_BACKWARD_S if is_ours and "heavy tail, staleness 0" in title else None
    fill_goal = GOAL_FILL if is_ours and "fast generator" in title else None
    delays = [step.first_backward_s - step.first_ready_s for step in steps]
    fills = [step.fill for step in steps]
    return [
        median(f"{at}, first sample to first backward", delays, "s", goal=start_goal),
        median(f"{at}, step", [step.seconds for step in steps], "s"),
        median(f"{at}, trainer busy", [step.busy_s for step in steps], "s"),
        median(f"{at}, fill of the token budget", fills, "", better="higher", goal=fill_goal),
        median(f"{at}, rounds", [float(step.num_rounds) for step in steps], "rounds/step"),
    ]


def _ratio(title: str, runs: Mapping[str, Sequence[Sequence[Step]]]) -> Figure:
    """Our time for the whole run by the better of the others', script by script."""
    ends = {policy: np.array([steps[-1].end_s for steps in seen]) for policy, seen in runs.items()}
    others = np.minimum(ends["whole batch"], ends["whatever there is"])
    ratios = (ends["ours"] / others).tolist()
    return median(f"{title}, run by the better other rule's", ratios, "", goal=GOAL_STEP_TIME)


if __name__ == "__main__":
    main()
