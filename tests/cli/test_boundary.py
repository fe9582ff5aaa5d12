import os

import click
import pytest
from click.testing import CliRunner
from ray._raylet import Config

from async_grpo.cli.boundary import command_boundary
from async_grpo.util.errors import ConfigError


def run(action):
    @click.command()
    @command_boundary()
    def command():
        action()

    return CliRunner().invoke(command)


def raising(error):
    def action():
        raise error

    return action


def imports_what_is_missing(package):
    def action():
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    return action


def imports_what_is_broken():
    # A dependency whose own code fails to load a library of the system.
    scope = {"__name__": "vllm.platforms"}
    exec("raise ImportError('libcudart.so.13: cannot open shared object file')", scope)


def test_our_errors_are_one_line_and_exit_code_1():
    result = run(raising(ConfigError("batch size\n  must be 1")))
    line = "error: batch size must be 1\n"
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", line)


def test_a_command_uses_the_machines_token_before_its_body_imports_ray(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.delenv("RAY_AUTH_MODE")
    modes = []
    assert run(lambda: modes.append(os.environ.get("RAY_AUTH_MODE"))).exit_code == 0
    monkeypatch.delenv("RAY_AUTH_MODE")
    Config.initialize("")
    assert modes == ["token"]


def test_an_interrupt_exits_with_130():
    assert run(raising(KeyboardInterrupt())).exit_code == 130


@pytest.mark.parametrize("action", [imports_what_is_missing("vllm.v1"), imports_what_is_broken])
def test_a_dependency_that_is_missing_or_broken_is_one_line_with_the_remedy(action):
    result = run(action)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: cannot import vllm (")
    assert "make setup" in line


def test_a_torchvision_that_does_not_fit_is_explained():
    def action():
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'AutoModel'") from error

    result = run(action)
    assert result.exit_code == 1
    assert "pip uninstall torchvision" in result.stderr


def test_bugs_keep_their_traceback():
    for error in (ValueError("bug"), RuntimeError("bug"), ModuleNotFoundError("x", name="mine")):
        assert run(raising(error)).exception is error


def test_an_import_error_that_was_handled_does_not_explain_a_later_bug():
    def action():
        try:
            imports_what_is_missing("flash_attn")()
        except ImportError:
            raise RuntimeError("bug")  # noqa: B904 - the context is the point

    assert isinstance(run(action).exception, RuntimeError)
