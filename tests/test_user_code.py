"""Files of users are read once and run from their text; other texts are refused, naming both."""

import pytest

from async_grpo.errors import ConfigError
from async_grpo.user_code import UserCode, run_file

MINE = """
from __future__ import annotations
from dataclasses import dataclass
from neighbour import NUMBER
@dataclass
class Mine(dict):
    number: int = NUMBER
"""


def test_a_file_may_import_its_neighbours_and_hold_dataclasses(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "neighbour.py").write_text("NUMBER = 7")
    code = UserCode.read(f"{tmp_path}/mine.py:Mine", option="--mine", shipped=())
    assert code.load(dict)().number == 7


def test_a_text_runs_once_in_a_process(tmp_path, capsys):
    path, text = str(tmp_path / "mine.py"), "print('imported')"
    assert run_file(path, text) is run_file(path, text)
    assert capsys.readouterr().out == "imported\n"
    assert run_file(path, text + "#") is not run_file(path, text)


def test_a_path_is_the_same_file_from_any_working_directory(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    code = UserCode.read("mine.py:Mine", option="--mine", shipped=())
    assert code.place == f"{tmp_path}/mine.py"


def test_another_text_is_refused_naming_the_file_and_both_hashes():
    one, other = UserCode("mine.py:Mine", "1"), UserCode("mine.py:Mine", "2")
    one.require_same(one)
    with pytest.raises(ConfigError, match=f"mine.py:Mine must .*{one.sha256}, got {other.sha256}"):
        one.require_same(other)


def test_what_exits_as_it_is_imported_is_refused(tmp_path):
    code = UserCode(f"{tmp_path}/mine.py:Mine", "raise SystemExit(3)")
    with pytest.raises(ConfigError, match=r"mine.py cannot be imported: SystemExit\(3\): correct"):
        code.load(dict)
