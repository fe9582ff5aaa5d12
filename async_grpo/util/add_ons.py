"""Add-ons: parts of the package that are imported by name, each where it is first used.

The core imports none of them (`make imports`); entry points in pyproject.toml name them.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from async_grpo.util.errors import ConfigError

GROUP = "async_grpo.add_ons"


@cache
def add_on(name: str) -> Any:
    """Import the class, function or module of an add-on; raises `ConfigError` where there is none.

    >>> add_on("weight_delta").__name__
    'async_grpo.weight_sync.delta'
    """
    for found in entry_points(group=GROUP, name=name):
        return found.load()
    raise ConfigError(
        f"{name} is no add-on of this installation: install the package again, by make setup or pip"
    )
