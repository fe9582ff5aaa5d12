import pytest

from async_grpo.model.model_folder import check_model_folder
from benchmarks.stack import MODEL
from benchmarks.staleness import figures_of
from benchmarks.two_cores import Measured, Work, even_lengths, summarise

NOTES = (
    "generator", "trainer", "services", "controller", "verifiers", "generator_queued",
    "trainer_queued",
)  # fmt: skip


def measured(**changes):
    values = {
        "wall": 4.0, "generator": 1.0, "trainer": 3.0, "services": 0.5, "controller": 0.3,
        "verifiers": 0.1, "generator_queued": 0.0,
        "trainer_queued": 0.0, "waiting": 1.0, "publishing": 0.1, "output_tokens": 100.0,
        "max_lag": 0,
    }  # fmt: skip
    return Measured(**values | changes)


def test_figures_are_means_a_batch():
    row = {
        "seconds": 4.0, "seconds_waiting": 1.0, "seconds_publishing": 0.2, "num_samples": 10,
        "avg_output_tokens": 20.0, "max_lag": 1,
    }  # fmt: skip
    notes = [dict.fromkeys(NOTES, 5.0), dict.fromkeys(NOTES, 11.0)]
    run = summarise([row, row | {"seconds": 2.0, "max_lag": 0}], notes)
    assert (run.wall, run.waiting, run.publishing) == pytest.approx((3.0, 1.0, 0.2))
    assert run.generator == run.trainer_queued == 3.0
    assert (run.output_tokens, run.max_lag) == (200.0, 1)


def test_idle_shares_and_ratios_are_those_of_the_runs():
    runs = {0: [measured(), measured()], 1: [measured(wall=3.2), measured(wall=3.6)]}
    figures = {figure.name: figure for figure in figures_of("even", runs)}
    assert figures["even, bound max(g, t) / (g + t)"].value == 0.75
    assert figures["even, staleness 0, generator idle"].value == 0.75
    assert figures["even, staleness 0, trainer idle"].value == 0.25
    assert figures["even, staleness 1, wall time / (g + t)"].spread == (0.8, 0.9)
    assert figures["even, staleness 1, wall time / staleness 0's"].spread == (0.8, 0.9)
    assert figures["even, staleness 1, bound / wall"].value == pytest.approx(
        3 * (1 / 3.2 + 1 / 3.6) / 2
    )
    assert figures["even, staleness 0, both cores busy"].value == pytest.approx(4.5 / 8)


def test_a_run_ends_to_count_before_its_last_batch_is_generated():
    # With bound S batch N-1 is generated while batch N-2-S trains, if generation is the faster.
    assert [Work(num_batches=14).last_row(bound) for bound in (0, 1, 2)] == [13, 12, 11]


def test_even_lengths_come_from_an_end_token_that_the_model_never_samples(tmp_path):
    assert check_model_folder(str(MODEL)).stop_token_ids == (1,)
    assert check_model_folder(str(even_lengths(tmp_path / "even"))).stop_token_ids == (0,)
