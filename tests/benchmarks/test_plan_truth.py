"""The files of `benchmarks.plan_truth` are runs, and its figures are ratios with goals."""

from pathlib import Path

import pytest

from async_grpo.cli.local_run import read_run
from benchmarks.plan_truth import CASES, KNOWN, _ratio, within
from benchmarks.results import Figure


@pytest.mark.parametrize("case", [*KNOWN, *CASES], ids=lambda case: case.name)
def test_every_case_is_a_run_of_the_options_that_it_names(case, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(case.toml(Path("runs"), Path("puzzles.jsonl")))
    run = read_run(config=str(file), train_options=(), prepare="", num_cpus=0, ray_address="")
    assert (
        run.num_ranks == case.ranks and run.train.batching.steps_per_batch == case.steps_per_batch
    )
    assert [each.mode for each in run.workers] == ["generation"] + ["logprob"] * case.with_reference
    assert run.train.sampling.max_staleness == case.max_staleness


def test_no_planned_run_is_one_of_those_that_it_is_planned_from():
    names = [case.name for case in (*KNOWN, *CASES)]
    assert len(CASES) == 6 and len(set(names)) == 8
    assert all(case.toml(Path("r"), Path("d")) != known.toml(Path("r"), Path("d")).replace(
        known.name, case.name) for case in CASES for known in KNOWN)  # fmt: skip


def test_a_ratio_is_within_its_goal_on_either_side():
    figures = [_ratio("a", 1.2, 0.25), _ratio("b", 0.7, 0.25), _ratio("c", 0.86, 0.15)]
    assert [each.goal for each in figures] == [1.25, 0.75, 0.85]
    assert within([*figures, Figure("step, measured", 3.0, "s")]) == 2
