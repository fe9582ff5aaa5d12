"""Files of users are read once and run from their text; other texts are refused, naming both."""

import pytest

from async_grpo.util.errors import ConfigError
from async_grpo.util.user_code import UserCode, hash_imported, run_file

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


def test_the_modules_that_a_file_imports_out_of_its_own_folder_are_hashed(tmp_path):
    main = "import os, torch, async_grpo, helper\nfrom lib.deep import f\nfrom . import near\n"
    texts = {
        "mine.py": main, "helper.py": "import second", "second.py": "", "near.py": "",
        "lib/__init__.py": "", "lib/deep.py": "from . import beside", "lib/beside.py": "",
        "unused.py": "", "async_grpo/__init__.py": "",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    code = UserCode.read(f"{tmp_path}/mine.py:Mine", option="--mine", shipped=())
    hashes = code.hashes("algorithm")
    named = ("helper.py", "second.py", "near.py", "lib/__init__.py", "lib/deep.py", "lib/beside.py")
    assert hashes.keys() == {"algorithm", *(f"{name} of algorithm" for name in named)}
    assert hashes["algorithm"] == code.sha256
    (tmp_path / "second.py").write_text("1")
    edited = code.hashes("algorithm")
    assert {name for name in hashes if edited[name] != hashes[name]} == {"second.py of algorithm"}


def test_a_file_that_cannot_be_read_as_python_has_no_modules(tmp_path):
    (tmp_path / "mine.py").write_text("def (")
    assert hash_imported(str(tmp_path / "mine.py"), what="it") == {}
