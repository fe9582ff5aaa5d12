"""Examples and sample data are found in any folder."""

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from async_grpo.cli import run_file
from async_grpo.cli.launch_file import launch
from async_grpo.cli.main import examples, main
from async_grpo.cli.run_file import here_or_shared, with_shared

REPOSITORY = Path(__file__).parents[2]
MODEL = "sample-data/tiny-countdown"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_path_of_the_package_is_found_where_there_is_no_other(elsewhere):
    assert here_or_shared(MODEL) == str(REPOSITORY / MODEL)
    (elsewhere / MODEL).mkdir(parents=True)
    assert here_or_shared(MODEL) == MODEL


@pytest.mark.parametrize(
    "path", ["runs/mine", "my/sample-data/tiny-countdown", "sample-data/none", "../examples/x.toml"]
)
def test_other_paths_stay_what_they_are(path, elsewhere):
    assert here_or_shared(path) == path == with_shared(path)


def test_words_of_a_command_are_quoted_and_lists_are_looked_through(elsewhere, monkeypatch):
    folder = elsewhere / "a b"
    (folder / MODEL).mkdir(parents=True)
    monkeypatch.setattr(run_file, "shared_folder", lambda: folder)
    content = {"launch": {"prepare": f"make {MODEL} --x"}, "worker": [{"model_path": MODEL}]}
    found = with_shared(content)
    assert shlex.split(found["launch"]["prepare"]) == ["make", str(folder / MODEL), "--x"]
    assert found["worker"] == [{"model_path": str(folder / MODEL)}]


@pytest.mark.parametrize("name", [name for name, _ in examples()])
def test_every_example_is_a_run_in_an_empty_folder(name, elsewhere):
    file = dict(examples())[name].relative_to(REPOSITORY)
    result = CliRunner().invoke(launch, [str(file), "--dry-run"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert " sample-data/" not in result.stdout and '"sample-data/' not in result.stdout
    assert list(elsewhere.iterdir()) == []


def test_examples_are_listed_with_a_sentence_and_printed_whole():
    listed = CliRunner().invoke(main, ["example"]).stdout.splitlines()
    assert [line.split()[0] for line in listed] == [name for name, _ in examples()]
    assert all(line.endswith(".") or ":" in line for line in listed)
    printed = CliRunner().invoke(main, ["example", "black_box_agent"]).stdout
    assert printed == (REPOSITORY / "examples/black_box_agent/run.toml").read_text()
    wrong = CliRunner().invoke(main, ["example", "quikstart"])
    assert wrong.exit_code == 1 and "the nearest is quickstart" in wrong.stderr
