import json
import socket
from pathlib import Path

from benchmarks import results
from benchmarks.results import Figure, median


def test_a_file_holds_what_the_next_run_is_compared_with(tmp_path):
    figures = [median("time", [3.0, 1.0, 2.0], "s", goal=2.5), Figure("rate", 7.0, "1/s", "higher")]
    content = json.loads(results.write("example", figures, folder=tmp_path).read_text())
    assert set(content) == {"benchmark", "command", "machine", "date", "figures"}
    time, rate = content["figures"]
    assert time == {
        "name": "time", "value": 2.0, "unit": "s", "goal": 2.5, "better": "lower",
        "spread": [1.0, 3.0],
    }  # fmt: skip
    assert rate == {"name": "rate", "value": 7.0, "unit": "1/s", "goal": None, "better": "higher"}


def test_a_file_names_neither_the_machine_nor_its_folders(tmp_path):
    text = results.write("example", [], folder=tmp_path).read_text()
    content = json.loads(text)
    assert content["command"].startswith("python -m benchmarks.example")
    assert socket.gethostname() not in content["machine"]
    assert str(Path.home()) not in content["machine"]


def test_a_table_shows_value_spread_and_goal():
    shown = results.show([median("time", [3.0, 1.0, 2.0], "s", goal=2.5)])
    assert shown.splitlines()[1].split() == ["time", "2", "s", "1", "-", "3", "2.5"]
