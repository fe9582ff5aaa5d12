"""Environments are found by name; a user's text is read by the trainer and imported by workers."""

import sys

import pytest

from async_grpo.environments.find import load_environment, read_source
from async_grpo.errors import ConfigError, WorkerError
from async_grpo.types import EnvironmentSource

MINE = """
from async_grpo.environments.base import Environment
print("imported")
class Mine(Environment):
    pass
class Other:
    pass
class Broken(Environment):
    def __init__(self):
        raise OSError("no index")
"""


def test_a_shipped_environment_needs_no_source():
    assert read_source("single_turn") is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("poker", "no environment of that name"),
        ("nowhere.at.all:Mine", "nowhere.at.all cannot be read: No module named 'nowhere'"),
        ("missing.py:Mine", "missing.py cannot be read: .*No such file"),
    ],
)
def test_what_is_no_environment_is_refused_with_the_reason(name, reason):
    with pytest.raises(ConfigError, match=reason):
        read_source(name)


def test_the_trainer_reads_a_file_without_running_it_and_workers_need_only_the_text(
    tmp_path, capsys
):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    source = read_source(f"{path}:Mine")
    path.unlink()
    assert capsys.readouterr().out == ""
    assert type(load_environment(source)).__name__ == "Mine"
    assert capsys.readouterr().out == "imported\n"


def test_a_module_that_is_another_here_than_the_trainer_s_is_refused_naming_both(
    tmp_path, monkeypatch
):
    (tmp_path / "package_of_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    source = read_source("package_of_mine:Mine")
    assert "package_of_mine" not in sys.modules
    assert type(load_environment(source)).__name__ == "Mine"
    other = EnvironmentSource(source.name, MINE + "#")
    said = rf"the trainer's \({other.digest}\), got {source.digest}"
    with pytest.raises(WorkerError, match=said):
        load_environment(other)


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        ("Other", "must be derived from Environment"),
        ("Missing", "cannot be made: AttributeError"),
        ("Broken", r"cannot be made: OSError\('no index'\)"),
    ],
)
def test_what_cannot_be_played_is_refused_by_the_worker(attribute, reason):
    with pytest.raises(WorkerError, match=reason):
        load_environment(EnvironmentSource(f"mine.py:{attribute}", MINE))
