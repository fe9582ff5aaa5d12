"""The guard compares with files that are there, and says so where they are not."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import guard, results
from benchmarks.catalogue import FILES, GUARDED, NAMES
from benchmarks.results import RATIOS, Figure

PACKED = [Figure("packed / padded", 0.5, "x")]


@pytest.fixture
def guarded(monkeypatch, tmp_path):
    """The guard over a folder that has the file of every benchmark, of one commit."""
    for name in NAMES:
        results.write(FILES.get(name, (name,))[-1], PACKED, folder=tmp_path)
    packed = (tmp_path / "packing.json").read_text()
    monkeypatch.setattr(
        guard.subprocess, "run",
        lambda command, **_: Path(command[-1], "packing.json").write_text(packed),
    )  # fmt: skip
    return tmp_path


def said(folder):
    found = CliRunner().invoke(guard.main, ["--results-dir", str(folder)])
    return found.exit_code, found.output


@pytest.mark.parametrize("name", GUARDED)
def test_what_is_guarded_has_ratios_on_file(name):
    assert any(figure.unit in RATIOS for figure in results.read(name))


def test_files_of_one_commit_are_passed_over_in_silence(guarded):
    assert said(guarded) == (0, "no ratio got worse\n")


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_without_a_file_is_no_ratio_that_held(guarded, name):
    (guarded / f"{FILES.get(name, (name,))[-1]}.json").unlink()
    code, output = said(guarded)
    assert code == 1 and "no ratio got worse" not in output
    assert f"no file of {name} to compare with" in output
    assert f'make benchmarks ARGS="{name}"' in output


def test_files_of_two_commits_are_told(guarded):
    file = guarded / "startup.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "commit": "abc1234"}))
    code, output = said(guarded)
    assert code == 0
    assert f"of several commits: abc1234 (startup), {content['commit']} (packing, " in output


def test_a_ratio_that_is_worse_than_on_file_fails():
    on_file = [Figure("packed / padded", 0.5, "x"), Figure("time", 1.0, "s")]
    assert guard.worse([Figure("packed / padded", 0.7, "x")], on_file, slack=0.1)
    assert guard.worse([Figure("time", 9.0, "s")], on_file, slack=0.1)  # the ratio is missing
    assert not guard.worse([Figure("packed / padded", 0.52, "x")], on_file, slack=0.1)
