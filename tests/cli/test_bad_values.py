"""What each of many bad values is answered, word for word, whichever way it is given."""

import shlex
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from async_grpo.api.running import plan_run
from async_grpo.cli.main import main
from async_grpo.util.errors import ConfigError

CASES = tomllib.loads(Path(__file__).with_name("bad_values.toml").read_text())
TRAIN = '[train]\nmodel_name_or_path = "m"\n'
OF_ONE = TRAIN + 'data_path = "d.jsonl"\n'
FILES = {  # what stands above a case's line
    "file": "",
    "train": OF_ONE,
    "data": TRAIN + '[[data]]\ntype = "sums"\npath = "s.jsonl"\n',
    "eval": OF_ONE + '[[eval]]\nname = "math"\npath = "m.jsonl"\n',
    "worker": OF_ONE + '[[worker]]\nmodel_path = "m"\n',
}
TYPED = {
    "typed": (),
    "trainer": ("train", "--model-name-or-path", "m", "--data-path", "d"),
    "of_files": ("train", "--model-name-or-path", "m"),
}


def cases(ways):
    return [pytest.param(way, *case, id=f"{way}: {case[0]}") for way in ways for case in CASES[way]]


def asked(*words):
    """Exit code and answer of a command."""
    done = CliRunner().invoke(main, words)
    assert isinstance(done.exception, SystemExit), done.exception
    lines = [line for line in done.output.splitlines() if not line.startswith(("Usage:", "Try "))]
    return f"{done.exit_code}: {' '.join(filter(None, lines))}"


@pytest.mark.parametrize(("way", "given", "answer"), cases(FILES))
def test_a_bad_value_in_a_file_has_its_answer(way, given, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(FILES[way] + given)
    assert asked("launch", "run.toml", "--dry-run") == answer
    assert answer.partition("rror: ")[2] in asked("check", "run.toml")


@pytest.mark.parametrize(("way", "given", "answer"), cases(TYPED))
def test_a_bad_value_that_is_typed_has_its_answer(way, given, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert asked(*TYPED[way], *shlex.split(given)) == answer


@pytest.mark.parametrize(("config", "options", "answer"), CASES["python"])
def test_a_bad_value_of_python_has_its_answer(config, options, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        plan_run(config, **options)
    assert str(error.value) == answer
