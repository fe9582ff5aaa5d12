"""The simulation of benchmarks/scaling equals what can be worked out by hand, and loses nothing.

Mutations seen to fail:
- caches survive new weights -> the tokens of what runs
- weights are gathered twice -> sum of its parts
- a step stays as long as an empty engine's -> slows with its sequences
- a sample of every bin is never trained -> every sample (the ledger says so)
- a batcher's last marker is not kept for the others -> every sample, with two batchers
- lengths do not depend on the seed -> same every time
- another share of the memory's speed -> latencies
"""

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.results import Figure
from benchmarks.scaling import hardware
from benchmarks.scaling.clock import Actor, Clock, Runner, Slots
from benchmarks.scaling.engine import Engine, EngineRates
from benchmarks.scaling.references import ReferenceRates
from benchmarks.scaling.scenario import ControlCosts, Scenario, SyncRates, TrainerRates
from benchmarks.scaling.scripted import compare
from benchmarks.scaling.service import simulate
from benchmarks.scaling.validation import KINDS, AtZero, services_of, validation_figures
from benchmarks.scripted_staleness import HEAVY

LENGTH, PROMPT = 100, 20


def hundred(_rng, count):
    return np.full(count, LENGTH)


def spread(rng, count):
    return rng.integers(10, 400, count)


# 16 samples of 120 tokens: 1 s to generate, 0.8 s to train on two ranks.
PLAIN = Scenario(
    num_engines=1,
    engine=EngineRates(step_s=0.01, capacity=64),
    num_ranks=2,
    trainer=TrainerRates(
        cost_per_second=1_200.0, max_tokens=2_000, attention_ratio=1e12, round_overhead_s=0.0,
        step_s=0.0,
    ),
    sync=SyncRates(gather_s=0.0, transfer_s=0.0, load_s=0.0),
    control=ControlCosts(poll_s=0.05),
    lengths=hundred,
    batch_size=2,
    prompt_tokens=PROMPT,
    max_staleness=0,
)  # fmt: skip
# With even lengths a batch is complete at once: nobody looks in vain, however often.
EXACT = dataclasses.replace(PLAIN, control=ControlCosts(poll_s=1e-6))
GENERATING, TRAINING = LENGTH * 0.01, 16 * (LENGTH + PROMPT) / 2 / 1_200


def with_staleness(scenario, bound):
    return dataclasses.replace(scenario, max_staleness=bound)


def test_without_overlap_a_batch_takes_the_sum_of_its_parts():
    sync = SyncRates(gather_s=0.2, transfer_s=0.3, load_s=0.1)
    outcome = simulate(dataclasses.replace(EXACT, sync=sync))
    assert outcome.seconds_per_batch == pytest.approx(GENERATING + TRAINING + 0.6, abs=1e-4)
    assert outcome.gathering == pytest.approx(0.2 / outcome.seconds_per_batch)
    assert outcome.trainers_busy == pytest.approx(TRAINING / outcome.seconds_per_batch)


def test_with_overlap_a_batch_takes_the_longest_of_its_parts():
    for bound in (2, 4):
        outcome = simulate(with_staleness(EXACT, bound))
        assert outcome.seconds_per_batch == pytest.approx(max(GENERATING / 2, TRAINING), rel=1e-3)


def test_new_weights_cost_a_load_and_the_tokens_of_what_runs():
    engine_clock, ends = Clock(), []
    engine = Engine(engine_clock, EngineRates(step_s=0.01, per_prefill_token_s=0.001))
    engine.generate(0, [100, 100], lambda: ends.append(engine_clock.now_s))
    engine_clock.at(0.5, lambda: engine.update(0.25))
    engine_clock.run(until=lambda: False)
    assert engine.recomputed_tokens == pytest.approx(100)  # two sequences of 50
    assert ends == [pytest.approx(1.0 + 0.25 + 0.1)]


def test_an_engine_slows_with_its_sequences_and_their_tokens():
    clock, ends = Clock(), []
    rates = EngineRates(step_s=0.01, per_sequence_s=0.01, capacity=2)
    engine = Engine(clock, rates)
    engine.generate(0, [10, 20, 5], lambda: ends.append(clock.now_s))
    clock.run(until=lambda: False)
    # 10 steps of two at 0.03 s, then 5 of two (the third took the place), 5 of one at 0.02 s.
    assert ends == [pytest.approx(0.3 + 0.15 + 0.1)]
    assert engine.sequence_s == pytest.approx(2 * 0.45 + 0.1)


def test_an_actor_serves_one_call_after_the_other_and_slots_side_by_side():
    clock, ends = Clock(), []
    actor, slots = Actor(clock), Slots(clock, 2)
    for seconds in (1.0, 2.0):
        actor.call(seconds, lambda: ends.append(clock.now_s))
    slots.do(3, seconds=0.4, done=lambda: ends.append(clock.now_s))
    clock.run(until=lambda: False)
    assert ends == [pytest.approx(0.8), pytest.approx(1.0), pytest.approx(3.0)]


def test_work_at_half_speed_takes_twice_as_long():
    clock, ends = Clock(), []
    runner = Runner(clock)
    runner.start(2.0, lambda: ends.append(clock.now_s))
    clock.at(1.0, lambda: runner.set_speed(0.5))
    clock.run(until=lambda: False)
    assert ends == [3.0]


@pytest.mark.parametrize("batchers", [1, 2])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_every_sample_is_trained_once(batchers, bound):
    scenario = dataclasses.replace(
        with_staleness(PLAIN, bound), lengths=spread, batch_size=8, num_engines=2,
        num_registries=batchers, num_batchers=batchers, num_verifiers=3,
        control=ControlCosts(
            registry_call_s=1e-3, batcher_group_s=1e-3, batcher_sample_s=1e-3, batcher_item_s=1e-3,
            pool_sample_s=1e-3, verification_s=0.01, ping_s=1e-3,
        ),
        reference=ReferenceRates(workers=2, tokens_per_second=5e4, max_tokens=4_000),
    )  # fmt: skip
    outcome = simulate(scenario)
    samples = outcome.samples_per_second * outcome.seconds_per_batch
    assert samples == pytest.approx(scenario.samples_per_batch)
    first = scenario.first_measured * scenario.batch_size
    ordinals = range(first, first + scenario.num_measured * scenario.batch_size)
    tokens = sum(sum(scenario.drawn(n)) + 8 * PROMPT for n in ordinals) / scenario.num_measured
    assert outcome.tokens_per_second * outcome.seconds_per_batch == pytest.approx(tokens)


def test_more_engines_never_mean_fewer_samples_while_generation_limits():
    scenario = dataclasses.replace(
        with_staleness(PLAIN, 1), lengths=spread, batch_size=32, num_ranks=8,
        engine=EngineRates(step_s=0.01, per_sequence_s=1e-3, capacity=16),
    )  # fmt: skip
    speeds = [
        simulate(dataclasses.replace(scenario, num_engines=engines)).samples_per_second
        for engines in (1, 2, 4, 8)
    ]
    assert speeds == sorted(speeds) and speeds[-1] > 2 * speeds[0]


def test_twice_the_cluster_with_twice_the_work_is_as_fast():
    def of(times):
        scenario = dataclasses.replace(
            with_staleness(PLAIN, 1), batch_size=4 * times, num_engines=times, num_ranks=2 * times
        )
        return simulate(scenario).samples_per_second / times

    assert of(8) == pytest.approx(of(1), rel=0.02)


def test_a_full_batcher_bounds_the_samples_and_two_of_them_double_it():
    costs = ControlCosts(batcher_sample_s=0.1, poll_s=0.05)
    scenario = dataclasses.replace(with_staleness(PLAIN, 4), control=costs, batch_size=8)
    one, two = (
        simulate(dataclasses.replace(scenario, num_batchers=n, num_ranks=16)) for n in (1, 2)
    )
    assert one.samples_per_second == pytest.approx(10, rel=0.05)
    assert one.batcher == pytest.approx(1, rel=0.05)
    assert two.samples_per_second == pytest.approx(20, rel=0.1)


def test_a_run_is_the_same_every_time():
    scenario = dataclasses.replace(with_staleness(PLAIN, 1), lengths=spread, batch_size=8)
    assert simulate(scenario) == simulate(scenario)
    assert simulate(scenario) != simulate(dataclasses.replace(scenario, seed=1))


@pytest.mark.parametrize("bound", [0, 1])
def test_the_scripted_run_with_the_real_outbox_says_the_same(bound):
    script = dataclasses.replace(
        HEAVY, max_staleness=bound, num_batches=8, batch_size=32, capacity_seqs=512, num_ranks=2
    )
    assert compare(script) == pytest.approx(1, abs=0.02)


def test_staleness_is_predicted_from_a_run_without():
    """A machine whose services cost nothing: 0.5 s each, so that staleness halves the batch."""
    values = {}
    for kind, wall in (("even", 1.067), ("natural", 1.067)):
        values |= {
            f"{kind}, generating (g) at staleness 0": 0.5,
            f"{kind}, training (t) at staleness 0": 0.5,
            f"{kind}, staleness 0, wall time": wall,
            f"{kind}, staleness 0, both cores busy": 1 / (2 * wall),
        }
    runs = [(kind, AtZero.of(kind.name, values)) for kind in KINDS]
    assert services_of(runs).sample_s == pytest.approx(0, abs=1e-9)
    for kind in ("even", "natural"):
        values[f"{kind}, staleness 0, wall time"] = 1.067
    found = {figure.name: figure.value for figure in validation_figures(values, bounds=(0,))}
    assert found["real run, even lengths, staleness 0: wall time"] == pytest.approx(1, abs=0.05)
    assert found["real run, natural lengths, staleness 0: wall time"] == pytest.approx(1, abs=0.1)


def test_the_latencies_that_the_rates_were_chosen_for_are_met():
    by_name = {figure.name: figure for figure in hardware.latency_figures()}
    chosen = [figure for name, figure in by_name.items() if name.endswith("vLLM")]
    assert len(chosen) == 2 and all(isinstance(figure, Figure) for figure in chosen)
    assert [figure.value for figure in chosen] == pytest.approx([1, 1], abs=0.06)


def test_a_7b_engine_decodes_as_its_roofline_says():
    rates = hardware.engine_rates(hardware.MODELS["7B"])
    weights_s = 7.62e9 * 2 / (3.35e12 * 0.8)
    assert rates.step_s == pytest.approx(2.3e-3 + weights_s)
    assert rates.per_sequence_s == pytest.approx(2 * 7.62e9 / (989e12 * 0.5))
    assert math.isclose(rates.per_kv_token_s, 2 * 28 * 512 * 2 / (3.35e12 * 0.8))
