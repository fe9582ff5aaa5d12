"""Staleness bounds compared with scripted durations: how much of the overlap the admission gives.

Generation (g) and training (t) of a batch are measured at staleness 0 when training starts with the
complete batch: nothing overlaps then. With even lengths nothing brings a batch below max(g, t); a
heavy tail leaves engines half empty at staleness 0, which more work in flight fills: above 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from async_grpo.planning.rates import ControlCosts, EngineRates, SyncRates, TrainerRates
from async_grpo.planning.service import Scenario, mean, simulate
from benchmarks.results import Figure, median

GOAL_SHARE_OF_BOUND = 0.9
WARM_UP = 2  # batches until generation is as far ahead as it may be
LONGEST = 16_384  # output tokens of a reasoning run


def even(_rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Every output is as long as the next."""
    return np.full(count, 2_000)


def heavy_tail(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Lognormal, median 1,500 tokens, cut at LONGEST: reasoning runs."""
    return np.clip(rng.lognormal(np.log(1_500), 1.0, count), 16, LONGEST).astype(np.int64)


# All sequences of a batch run at once; training an even batch then takes as long as sampling it.
EVEN = Scenario(
    engine=EngineRates(step_s=0.025, capacity=1024),
    trainer=TrainerRates(
        cost_per_second=8_000.0, max_tokens=18_432, round_overhead_s=0.3, step_s=0.0
    ),
    sync=SyncRates(transfer_s=0.5),
    control=ControlCosts(verification_s=0.2),
    lengths=even,
)
HEAVY = dataclasses.replace(
    EVEN, lengths=heavy_tail, engine=EngineRates(step_s=0.005, capacity=1024)
)
SCENARIOS = {"even": EVEN, "heavy-tailed": HEAVY}


def scripted_figures(
    scenarios: Mapping[str, Scenario] = SCENARIOS,
    *,
    seeds: int = 3,
    bounds: Sequence[int] = (0, 1, 2),
) -> list[Figure]:
    """Share of the bound that each staleness reaches, for each kind of lengths."""
    figures: list[Figure] = []
    for kind, scenario in scenarios.items():
        runs = [compare(dataclasses.replace(scenario, seed=n), bounds) for n in range(seeds)]
        title = f"scripted, {kind} lengths"
        floors = [floor for floor, _ in runs]
        figures.append(median(f"{title}, bound max(g, t) / (g + t)", floors, "fraction"))
        for bound in bounds:
            goal = GOAL_SHARE_OF_BOUND if kind == "even" and bound else None
            shares, generator, trainer = zip(*(found[bound] for _, found in runs), strict=True)
            at = f"{title}, staleness {bound}"
            figures += [
                median(f"{at}, bound / wall", shares, "fraction", better="higher", goal=goal),
                median(f"{at}, generator idle", generator, "fraction"),
                median(f"{at}, trainer idle", trainer, "fraction"),
            ]
    return figures


def compare(
    scenario: Scenario, bounds: Sequence[int]
) -> tuple[float, dict[int, tuple[float, float, float]]]:
    """The bound by the sum; by staleness, the bound by the wall, generator and trainer idle."""
    serial = simulate(dataclasses.replace(scenario, max_staleness=0, waits_for_step=True))[WARM_UP:]
    g = mean(serial, lambda step: step.engines_busy_s)
    t = mean(serial, lambda step: step.busy_s)
    found = {}
    for bound in bounds:
        run = simulate(dataclasses.replace(scenario, max_staleness=bound))
        # The last ones are not counted: nothing is generated beside them any more.
        steps = run[WARM_UP : len(run) - bound]
        seconds = mean(steps, lambda step: step.seconds)
        generator, trainer = (
            1 - mean(steps, lambda step: step.engines_busy_s) / seconds,
            1 - mean(steps, lambda step: step.busy_s) / seconds,
        )
        found[bound] = (max(g, t) / seconds, generator, trainer)
    return max(g, t) / (g + t), found
