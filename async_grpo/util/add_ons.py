"""Add-ons: what a run can do without, imported by name when somebody asks for it.

No file of the core imports one (`make imports`). Entry points of the installation name them, in
pyproject.toml.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from async_grpo.util.errors import ConfigError

GROUP = "async_grpo.add_ons"


@cache
def add_on(name: str) -> Any:
    """The class, function or module of that name.

    Raises `ConfigError` where the installation has none.

    >>> add_on("weight_delta").__name__
    'async_grpo.weight_sync.delta'
    """
    for found in entry_points(group=GROUP, name=name):
        return found.load()
    raise ConfigError(
        f"{name} is no add-on of this installation: install the package again, by make setup or pip"
    )
