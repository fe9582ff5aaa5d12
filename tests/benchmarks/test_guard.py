"""The guard compares with files that are there, and says so where they are not."""

import pytest
from click.testing import CliRunner

from benchmarks import guard, results
from benchmarks.catalogue import GUARDED
from benchmarks.results import RATIOS, Figure


@pytest.mark.parametrize("name", GUARDED)
def test_what_is_guarded_has_ratios_on_file(name):
    assert any(figure.unit in RATIOS for figure in results.read(name))


def test_a_benchmark_without_a_file_is_no_ratio_that_held(monkeypatch):
    monkeypatch.setattr(guard.subprocess, "run", lambda *_, **__: pytest.fail("it ran"))
    found = CliRunner().invoke(guard.main, ["packing", "control_memory"])
    assert found.exit_code == 1 and "no ratio got worse" not in found.output
    assert "no file of control_memory to compare with" in found.output


def test_a_ratio_that_is_worse_than_on_file_fails():
    on_file = [Figure("packed / padded", 0.5, "x"), Figure("time", 1.0, "s")]
    assert guard.worse([Figure("packed / padded", 0.7, "x")], on_file, slack=0.1)
    assert guard.worse([Figure("time", 9.0, "s")], on_file, slack=0.1)  # the ratio is missing
    assert not guard.worse([Figure("packed / padded", 0.52, "x")], on_file, slack=0.1)
