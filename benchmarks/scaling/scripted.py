"""Against `benchmarks.scripted_run`: another simulation, in which the outbox is real too.

It runs the service's own asyncio code for admission, rounds and outbox with scripted durations. The
same durations are given to both; both know nothing of each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks import scripted_run
from benchmarks.results import Figure
from benchmarks.rounds import ours
from benchmarks.scaling.engine import EngineRates
from benchmarks.scaling.scenario import ControlCosts, Scenario, SyncRates, TrainerRates
from benchmarks.scaling.service import simulate
from benchmarks.scripted_run import Script
from benchmarks.scripted_staleness import SCRIPTS

UNIT = "predicted / scripted"


def as_scenario(script: Script) -> Scenario:
    """The same cluster: one engine that decodes every sequence at its own pace."""
    return Scenario(
        num_engines=1,
        engine=EngineRates(step_s=script.seconds_per_token, capacity=script.capacity_seqs),
        num_ranks=script.num_ranks,
        trainer=TrainerRates(
            cost_per_second=script.tokens_per_second,
            max_tokens=script.max_tokens,
            round_overhead_s=script.round_overhead_s,
            step_s=0.0,
        ),
        sync=SyncRates(gather_s=0.0, transfer_s=script.publish_s, load_s=0.0),
        control=ControlCosts(
            verification_s=script.verification_s, poll_s=scripted_run.POLL_INTERVAL_S
        ),
        lengths=script.lengths,
        batch_size=script.batch_size,
        samples_per_question=script.samples_per_question,
        prompt_tokens=script.prompt_tokens,
        max_staleness=script.max_staleness,
        num_warm_up=2,
        num_measured=script.num_batches - 2 * script.max_staleness - 3,
        num_verifiers=2 * script.capacity_seqs,  # never a line
        seed=script.seed,
    )


def compare(script: Script) -> float:
    """Seconds a batch, ours by theirs, over the same batches."""
    scenario = as_scenario(script)
    steps = scripted_run.simulate(script, ours)
    first = scenario.first_measured
    theirs = steps[first : first + scenario.num_measured]
    seconds = sum(step.seconds for step in theirs) / len(theirs)
    return simulate(scenario).seconds_per_batch / seconds


def scripted_figures(
    scripts: Mapping[str, Script] = SCRIPTS, *, bounds: Sequence[int] = (0, 1, 2)
) -> list[Figure]:
    """One figure a kind of lengths and staleness."""
    return [
        Figure(
            f"scripted run, {kind} lengths, staleness {bound}: seconds a batch",
            compare(dataclasses.replace(script, max_staleness=bound, num_batches=12)),
            UNIT,
        )
        for kind, script in scripts.items()
        for bound in bounds
    ]
