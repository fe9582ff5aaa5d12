"""Environments are found by name; a user's text is read by the trainer and imported by workers."""

import sys

import pytest

from async_grpo.environments.find import make_environment, users_environment
from async_grpo.util.errors import AsyncGrpoError, ConfigError
from async_grpo.util.user_code import UserCode

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
    assert users_environment("single_turn") is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("poker", "must be single_turn, .*'poker': there is none of that name"),
        ("nowhere.at.all:Mine", "'nowhere.at.all:Mine': No module named 'nowhere'"),
        ("missing.py:Mine", "'missing.py:Mine': .*No such file"),
    ],
)
def test_what_is_no_environment_is_refused_with_the_reason(name, reason):
    with pytest.raises(ConfigError, match=reason):
        users_environment(name)


def test_the_trainer_reads_a_file_without_running_it_and_workers_need_only_the_text(
    tmp_path, capsys
):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    source = users_environment(f"{path}:Mine")
    path.unlink()
    assert capsys.readouterr().out == ""
    assert type(make_environment(source)).__name__ == "Mine"
    assert capsys.readouterr().out == "imported\n"


def test_a_module_that_is_another_here_than_the_trainer_s_is_refused_naming_both(
    tmp_path, monkeypatch
):
    (tmp_path / "package_of_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    source = users_environment("package_of_mine:Mine")
    assert "package_of_mine" not in sys.modules
    assert type(make_environment(source)).__name__ == "Mine"
    other = UserCode(source.name, MINE + "#")
    said = rf"the run's sha256 is {other.sha256}, got {source.sha256} here"
    with pytest.raises(ConfigError, match=said):
        make_environment(other)


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        ("Other", "must be a class derived from Environment"),
        ("Missing", "must be a class derived from Environment, got None"),
        ("Broken", r"cannot be made, OSError\('no index'\) at .*mine.py:\d+"),
    ],
)
def test_what_cannot_be_played_is_refused_by_the_worker(attribute, reason):
    with pytest.raises(AsyncGrpoError, match=reason):
        make_environment(UserCode(f"mine.py:{attribute}", MINE))
