"""The scripted benchmarks tell what they are meant to tell, at a tiny size.

Broken on purpose, in a copy -> what failed:
- `RoundFormer._asked_fill` always `fill_target` -> heavy tail
- `RoundFormer._asked_fill` always 0 -> budgets
- `AdmissionWindow.admissible` without `max_staleness` -> overlap
- `AdmissionWindow.admissible` one batch further -> without overlap
- `RoundFormer._form` forgets the leftover -> every sample
"""

import dataclasses

import numpy as np
import pytest

from benchmarks.rounds import POLICIES, even, heavy_tail, ours, whatever_there_is, whole_batch
from benchmarks.scripted_run import Script, simulate
from benchmarks.scripted_staleness import EVEN, scripted_figures

SMALL = Script(
    lengths=heavy_tail, seconds_per_token=0.02, batch_size=32, capacity_seqs=128, num_ranks=2,
    num_batches=3,
)  # fmt: skip


def trained_tokens(script, steps):
    return sum(s.fill * s.num_rounds for s in steps) * script.num_ranks * script.max_tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_every_sample_is_trained_whatever_the_rule(policy):
    lengths = [
        heavy_tail(np.random.default_rng([SMALL.seed, ordinal]), SMALL.samples_per_question)
        for ordinal in range(SMALL.num_batches * SMALL.batch_size)
    ]
    expected = sum(map(sum, lengths)) + SMALL.prompt_tokens * sum(map(len, lengths))
    steps = simulate(SMALL, POLICIES[policy])
    assert trained_tokens(SMALL, steps) == pytest.approx(expected)


def test_without_overlap_a_batch_takes_generation_and_training():
    script = dataclasses.replace(SMALL, lengths=even, publish_s=3.0)
    for step in simulate(script, whole_batch)[1:]:
        alone = step.generating_s + script.verification_s + step.busy_s + script.publish_s
        assert step.seconds == pytest.approx(alone, abs=0.5)  # polls


def test_on_a_heavy_tail_trainers_start_early_and_lose_nothing_by_it():
    mine, whole, greedy = (
        simulate(SMALL, policy) for policy in (ours, whole_batch, whatever_there_is)
    )
    assert max(step.first_backward_s - step.first_ready_s for step in mine) < 3
    assert min(step.first_backward_s - step.first_ready_s for step in whole) > 100
    assert mine[-1].end_s <= 1.02 * min(whole[-1].end_s, greedy[-1].end_s)


def test_with_a_fast_generator_trainers_see_full_budgets():
    script = dataclasses.replace(SMALL, seconds_per_token=0.0005, batch_size=128)
    mine = simulate(script, ours)
    assert min(step.fill for step in mine) >= 0.9
    greedy = simulate(script, whatever_there_is)
    assert np.mean([step.fill for step in greedy]) < np.mean([step.fill for step in mine])


def test_staleness_1_overlaps_even_durations_and_staleness_0_cannot():
    script = dataclasses.replace(
        EVEN, batch_size=16, capacity_seqs=128, num_ranks=1, tokens_per_second=7_000.0
    )
    figures = scripted_figures({"even": script}, seeds=1, bounds=(0, 1))
    values = {figure.name: figure.value for figure in figures}
    assert values["scripted, even lengths, staleness 1, bound / wall"] >= 0.9
    assert values["scripted, even lengths, staleness 0, bound / wall"] < 0.55
    # What is left at staleness 1: training takes a tenth longer than generating.
    assert values["scripted, even lengths, staleness 0, generator idle"] > 0.5
    assert values["scripted, even lengths, staleness 1, generator idle"] < 0.15
    assert values["scripted, even lengths, staleness 0, trainer idle"] == pytest.approx(
        0.5, abs=0.05
    )
