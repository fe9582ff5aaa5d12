"""What Tab offers, asked as the shells ask."""

import subprocess
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from async_grpo.cli.main import PLACES, PROGRAM, VARIABLE, main


def offered(*words):
    *before, incomplete = words
    found = BashComplete(main, {}, PROGRAM, VARIABLE).get_completions(before, incomplete)
    return [item.value for item in found]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("la",), ["launch"]),
        (("train", "--learning"), ["--learning-rate"]),
        (("train", "--preset", "d"), ["dr_grpo", "dapo"]),
        (("launch", "not-there.toml", "--learning"), ["--learning-rate"]),
        (("launch", "--emit", "s"), ["slurm"]),
        (("completion", ""), ["bash", "zsh", "fish"]),
    ],
)
def test_commands_options_and_choices_are_offered(words, wanted):
    assert offered(*words) == wanted


def test_a_file_is_the_shell_s_to_complete():
    found = BashComplete(main, {}, PROGRAM, VARIABLE).get_completions(["launch"], "ex")
    assert [item.type for item in found] == ["file"]


@pytest.mark.parametrize("shell", PLACES)
def test_what_is_installed_is_what_is_printed(shell, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    printed = CliRunner().invoke(main, ["completion", shell]).stdout
    told = CliRunner().invoke(main, ["completion", shell, "--install"]).stdout
    [file] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert str(file) in told and VARIABLE in printed
    assert file.read_text() == printed.removesuffix("\n")


def test_a_home_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    Path(tmp_path, "home").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    result = CliRunner().invoke(main, ["completion", "fish", "--install"])
    assert result.exit_code == 1
    assert f"cannot write {tmp_path}/home/.config/fish" in result.stderr


def test_bash_takes_the_script(tmp_path):
    script = tmp_path / "script"
    script.write_text(CliRunner().invoke(main, ["completion", "bash"]).stdout)
    done = subprocess.run(
        ["bash", "--norc", "-c", f"source {script}; complete -p {PROGRAM}"],
        capture_output=True, text=True, timeout=10, check=True,
    )  # fmt: skip
    assert done.stdout.split()[-1] == PROGRAM
