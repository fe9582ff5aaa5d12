import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.results import Figure, median

REPOSITORY = Path(__file__).parents[2]


def test_a_file_holds_what_the_next_run_is_compared_with(tmp_path):
    figures = [median("time", [3.0, 1.0, 2.0], "s", goal=2.5), Figure("rate", 7.0, "1/s", "higher")]
    content = json.loads(results.write("example", figures, folder=tmp_path).read_text())
    assert set(content) == {"benchmark", "command", "commit", "machine", "date", "figures"}
    time, rate = content["figures"]
    assert time == {
        "name": "time", "value": 2.0, "unit": "s", "goal": 2.5, "better": "lower",
        "spread": [1.0, 3.0],
    }  # fmt: skip
    assert rate == {"name": "rate", "value": 7.0, "unit": "1/s", "goal": None, "better": "higher"}


@pytest.mark.parametrize("file", ["example.py", "example/__main__.py"])
def test_a_file_holds_the_command_that_ran(file, tmp_path):
    program = tmp_path / file
    program.parent.mkdir(exist_ok=True)
    program.write_text("from benchmarks import results; print(results.command())")
    typed = ("-m", "example", "--settings", "20M natural")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    command = [sys.executable, *typed]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert said.stdout == "python -m example --settings '20M natural'\n"


def test_a_file_names_neither_the_machine_nor_its_folders(tmp_path):
    content = json.loads(results.write("example", [], folder=tmp_path).read_text())
    assert socket.gethostname() not in content["machine"]
    assert str(Path.home()) not in content["machine"]


def test_a_file_tells_the_commit_that_was_measured_and_whether_its_code_had_changed(tmp_path):
    def git(*words):
        own = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *own, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    assert results.commit(folder) == "unknown"
    files = (folder / "packing.json", tmp_path / "docs" / "page.md", tmp_path / "code.py")
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("before")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    head = git("rev-parse", "--short", "HEAD")
    for file in files[:2]:
        file.write_text("after")
    assert results.commit(folder) == head
    git("commit", "-q", "-a", "-m", "figures alone")
    assert results.commit(folder) == head
    files[2].write_text("after")
    assert results.commit(folder) == f"{head}+changes"


def test_a_table_shows_value_spread_and_goal():
    shown = results.show([median("time", [3.0, 1.0, 2.0], "s", goal=2.5)])
    assert shown.splitlines()[1].split() == ["time", "2", "s", "1", "-", "3", "2.5"]
