"""The doors to what a run can do without."""

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from async_grpo.util.add_ons import GROUP, add_on
from async_grpo.util.errors import ConfigError

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
VLLM = "transport.nccl"  # imports what only a generation worker's machine has


def test_the_installation_has_every_add_on_of_the_project():
    declared = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][GROUP]
    assert {each.name: each.value for each in entry_points(group=GROUP)} == declared
    for name in declared.keys() - {VLLM}:
        assert add_on(name) is not None


def test_an_add_on_that_is_not_installed_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"environment\.none is no add-on of this installation"):
        add_on("environment.none")
