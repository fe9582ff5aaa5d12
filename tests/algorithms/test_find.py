"""Algorithms are found by name, and what the controller asks of them imports no torch."""

import subprocess
import sys

import pytest
from scripted_run import make_config

from async_grpo.algorithms.find import find_algorithm
from async_grpo.algorithms.grpo import Grpo
from async_grpo.algorithms.sft import Sft
from async_grpo.util.errors import ConfigError

MINE = """
from async_grpo.algorithms.grpo import Grpo
class Mine(Grpo):
    pass
class Other:
    pass
"""
UNIT = """
from async_grpo.algorithms.grpo import Grpo
from async_grpo.types.metrics import Metric
class Mine(Grpo):
    metrics = (Metric("share", "a", "b", "%", "Share", "of a in b"),)
"""


def test_shipped_algorithms_go_by_a_word():
    assert type(find_algorithm(make_config())) is Grpo
    assert type(find_algorithm(make_config(algorithm="sft"))) is Sft


def test_an_algorithm_may_be_a_class_of_a_file_or_of_a_module(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    by_path = find_algorithm(make_config(algorithm=f"{tmp_path}/mine.py:Mine"))
    monkeypatch.syspath_prepend(tmp_path)
    by_module = find_algorithm(make_config(algorithm="mine:Mine"))
    assert {type(found).__name__ for found in (by_path, by_module)} == {"Mine"}
    assert isinstance(by_path, Grpo) and isinstance(by_module, Grpo)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ppo", "must be grpo, sft, .*'ppo': there is none of that name"),
        ("nowhere.at.all:Mine", "'nowhere.at.all:Mine': No module named 'nowhere'"),
        ("{folder}/mine.py:Missing", "Missing must be a class derived from Algorithm, got None"),
        ("{folder}/mine.py:Other", "Other must be a class derived from Algorithm, got <class"),
        ("{folder}/broken.py:Mine", "cannot be imported: SyntaxError"),
        (
            "{folder}/unit.py:Mine",
            "^the unit of a Metric must be one of .*, got '%' for share: give",
        ),
    ],
)
def test_what_is_no_algorithm_is_refused_with_the_reason(tmp_path, name, reason):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("class Mine(")
    (tmp_path / "unit.py").write_text(UNIT)
    with pytest.raises(ConfigError, match=reason):
        find_algorithm(make_config(algorithm=name.format(folder=tmp_path)))


def test_finding_an_algorithm_imports_neither_torch_nor_ray():
    script = "import sys, async_grpo.algorithms.find; print({'torch', 'ray'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout.strip() == "set()", found.stderr
