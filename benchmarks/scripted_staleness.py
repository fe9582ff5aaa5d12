"""Staleness bounds compared with scripted durations: how much of the overlap the admission gives.

Generation (g) and training (t) of a batch are measured at staleness 0 when training starts with the
complete batch: nothing overlaps then. With even lengths nothing brings a batch below max(g, t); a
heavy tail leaves engines half empty at staleness 0, which more work in flight fills: above 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.results import Figure, median
from benchmarks.rounds import even, heavy_tail, ours, whole_batch
from benchmarks.scripted_run import Script, Step, simulate

GOAL_SHARE_OF_BOUND = 0.9
WARM_UP = 2  # batches until generation is as far ahead as it may be
# All sequences of a batch run at once; training an even batch then takes as long as sampling it.
EVEN = Script(
    lengths=even, seconds_per_token=0.025, capacity_seqs=1024, num_batches=8, publish_s=0.5
)
HEAVY = dataclasses.replace(EVEN, lengths=heavy_tail, seconds_per_token=0.005)
SCRIPTS = {"even": EVEN, "heavy-tailed": HEAVY}


def scripted_figures(
    scripts: Mapping[str, Script] = SCRIPTS, *, seeds: int = 3, bounds: Sequence[int] = (0, 1, 2)
) -> list[Figure]:
    """Share of the bound that each staleness reaches, for each kind of lengths."""
    figures: list[Figure] = []
    for kind, script in scripts.items():
        shares: dict[int, list[float]] = {bound: [] for bound in bounds}
        idle: dict[int, list[float]] = {bound: [] for bound in bounds}
        waiting: dict[int, list[float]] = {bound: [] for bound in bounds}
        floors = []
        for seed in range(seeds):
            seeded = dataclasses.replace(script, seed=seed)
            serial = simulate(seeded, whole_batch)[WARM_UP:]
            g = float(np.mean([step.generating_s for step in serial]))
            t = float(np.mean([step.busy_s for step in serial]))
            floors.append(max(g, t) / (g + t))
            for bound in bounds:
                run = simulate(dataclasses.replace(seeded, max_staleness=bound), ours)
                # The last ones are not counted: nothing is generated beside them any more.
                steps = run[WARM_UP : len(run) - bound]
                waiting[bound].append(generator_idle(run, within=steps))
                shares[bound].append(max(g, t) / _mean_seconds(steps))
                busy = sum(step.busy_s for step in steps) / sum(step.seconds for step in steps)
                idle[bound].append(1 - busy)
        title = f"scripted, {kind} lengths"
        figures.append(median(f"{title}, bound max(g, t) / (g + t)", floors, "fraction"))
        for bound in bounds:
            at = f"{title}, staleness {bound}"
            goal = GOAL_SHARE_OF_BOUND if kind == "even" and bound else None
            figures += [
                median(f"{at}, bound / wall", shares[bound], "fraction", better="higher",
                       goal=goal),
                median(f"{at}, generator idle", waiting[bound], "fraction"),
                median(f"{at}, trainer idle", idle[bound], "fraction"),
            ]  # fmt: skip
    return figures


def generator_idle(run: Sequence[Step], *, within: Sequence[Step]) -> float:
    """Share of the time of some steps of a run in which no sequence ran, of whatever batch.

    >>> step = Step(0.0, 0.0, 0.0, 4.0, 1.0, (0.0, 2.0), 1, 1.0)
    >>> ahead = dataclasses.replace(step, start_s=4.0, end_s=8.0, generating=(1.0, 5.0))
    >>> generator_idle([step, ahead], within=[step])
    0.0
    >>> generator_idle([step, ahead], within=[step, ahead])
    0.375
    """
    began, ended = within[0].start_s, within[-1].end_s
    busy, until = 0.0, began
    for first, last in sorted(step.generating for step in run):
        busy += max(0.0, min(last, ended) - max(first, until))
        until = max(until, min(last, ended))
    return max(0.0, 1 - busy / (ended - began))


def _mean_seconds(steps: Sequence[Step]) -> float:
    return float(np.mean([step.seconds for step in steps]))
