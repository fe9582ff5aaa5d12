"""Rates that are read from a run's files predict the run that left them."""

import json
from dataclasses import replace

import pytest
from planning.runs import asked

from async_grpo.planning import prediction
from async_grpo.planning.asked import CPU
from async_grpo.planning.measured import (
    EarlierRun,
    RateSources,
    lengths_of,
    measured_step,
    rates_of,
    read_lengths,
    read_rows,
    work_of,
)
from async_grpo.planning.prediction import Work, predict
from async_grpo.planning.rates import Layout, from_peaks, measured_lengths
from async_grpo.util.errors import ConfigError
from async_grpo.util.run_folder import METRICS_FILE

LENGTHS = measured_lengths([[20, 30, 40, 10, 25, 35, 15, 5]], prompt=20.0, source="here")


@pytest.fixture(autouse=True)
def few_batches(monkeypatch):
    """In each simulation, which measures up to twelve."""
    monkeypatch.setattr(prediction, "MEASURED", (2, 4))


def run_of(*, bound, slower=1.0, kl=0.0, contributing=1.0):
    """A run and its metrics, as a simulation with known speeds has them."""
    run = asked("smollm2-135m", devices="", kl=kl, batch_size=16, max_generation_tokens=64,
                max_staleness=bound)  # fmt: skip
    run = replace(
        run,
        num_ranks=1,
        workers=(replace(run.workers[0], num_workers=1), *run.workers[1:]),
        fleet=replace(run.fleet, num_cores=8),
    )
    rates = from_peaks(run.model, replace(CPU, flops=100 * CPU.flops / slower), Layout())
    work = Work(asked=run, rates=rates, lengths=LENGTHS, contributing=contributing)
    told = predict(work, run.own_split, max_staleness=bound)
    row = {
        "seconds": told.step_s,
        "seconds_waiting": told.waiting_s,
        "seconds_publishing": told.gathering_s,
        "seconds_checkpointing": 0.0,
        "generator_idle_fraction": 1 - told.generating_s / told.step_s,
        "reference_idle_fraction": 1 - told.scoring_s / told.step_s,
        "avg_generating_samples": told.places * 256,
        "avg_output_tokens": 22.5,
        "avg_prompt_tokens": 20.0,
        "num_samples": 128,
        "trained_samples": 128 * contributing,
        "trained_tokens": 128 * contributing * 22.5,
        "num_minibatches": told.rounds,
        "sync_seconds": rates.sync.transfer_s + rates.sync.load_s,
        "sync_pause_seconds": rates.sync.load_s,
    }
    return EarlierRun(name=f"S{bound}", asked=run, rows=(row,) * 4, lengths=LENGTHS), told


def predicted(run, known, *, bound):
    work = work_of(run, RateSources(runs=known), LENGTHS)
    return predict(work(run.own_split), run.own_split, max_staleness=bound)


@pytest.mark.parametrize("slower", [0.5, 3.0])
@pytest.mark.parametrize("bound", [0, 1])
def test_a_run_predicts_itself(bound, slower):
    run, told = run_of(bound=bound, slower=slower)
    found = predicted(run.asked, (run,), bound=bound)
    # While batches overlap, an engine's constant and its part for each sequence look the same.
    assert found.step_s == pytest.approx(told.step_s, rel=0.2 if bound else 0.03)
    assert found.training_s == pytest.approx(told.training_s, rel=0.05)
    if not bound:
        assert found.generating_s == pytest.approx(told.generating_s, rel=0.05)


def test_a_run_predicts_another_staleness_and_half_the_batch():
    known, _ = run_of(bound=0, slower=2.0)
    other, told = run_of(bound=1, slower=2.0)
    assert predicted(other.asked, (known,), bound=1).step_s == pytest.approx(told.step_s, rel=0.15)


def test_the_speed_of_scoring_is_measured_where_something_was_scored():
    run, told = run_of(bound=0, slower=2.0, kl=0.1)
    found = predicted(run.asked, (run,), bound=0)
    assert found.scoring_s == pytest.approx(told.scoring_s, rel=0.1)
    rates = rates_of((run,), from_peaks(run.asked.model, CPU, Layout()))
    assert rates.source("scorer") == rates.source("engine") == "measured in S0"


def test_groups_without_variance_are_generated_and_not_trained():
    half, _ = run_of(bound=0, contributing=0.5)
    assert measured_step(half).contributing == 0.5
    work = work_of(half.asked, RateSources(runs=(half,)), LENGTHS)
    assert work(half.asked.own_split).contributing == 0.5


def write(folder, rows, samples=()):
    (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))


def test_lengths_are_those_of_the_dumped_groups(tmp_path):
    samples = [
        {"ordinal": ordinal, "attempt": 0, "num_output_tokens": 10 * ordinal + index}
        for ordinal in range(2)
        for index in range(3)
    ] + [{"ordinal": 9, "attempt": 0, "num_output_tokens": 999, "given": True}]
    samples.append({"ordinal": 7, "attempt": 0, "num_output_tokens": 0, "fate": "failed"})
    rows = [{"avg_prompt_tokens": 20.0, "avg_output_tokens": 7.4}] * 5
    write(tmp_path, rows, samples)
    found = read_lengths(tmp_path, read_rows(tmp_path), dump="samples.jsonl")
    assert found.outputs.groups == ((0, 1, 2), (10, 11, 12)) and found.prompt == 20
    assert read_lengths(tmp_path, rows, dump="").outputs.groups == ((7,),)


def test_a_folder_without_rows_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--from-run must be the folder of a run"):
        read_rows(tmp_path)
    write(tmp_path, [{}] * 4)
    with pytest.raises(ConfigError, match="must hold 5 gradient steps at least, got 4"):
        read_rows(tmp_path)


def test_lengths_that_are_given_go_before_those_of_runs():
    run, _ = run_of(bound=0)
    known = RateSources(runs=(run,))
    assert lengths_of(run.asked, known).source == "here"
    given = lengths_of(run.asked, known, output_tokens=40.0)
    assert given.moments()[0] == pytest.approx(40, abs=2) and given.prompt == 20
    with pytest.raises(ConfigError, match=r"--output-tokens must be at most .* got 65"):
        lengths_of(run.asked, known, output_tokens=65.0)
