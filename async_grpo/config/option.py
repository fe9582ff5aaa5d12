"""How an option is declared: a typed dataclass field with its help, from which the CLI is made."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import MISSING, field, fields
from typing import Any

from async_grpo.errors import ConfigError

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def option(
    default: Any,
    text: str,
    *,
    choices: Sequence[str] = (),
    none: Any = None,
    aliases: Sequence[str] = (),
    group: str = "",
) -> Any:
    """A dataclass field for one option; `text` is its help and `choices` its legal values.

    `none`: its value where None is typed, which nobody may who has not said what it means.
    `aliases`: other names of it on the command line. `group`: the heading in `--help` of this
    option and of those that follow it in its class.
    """
    metadata = {"help": text, "choices": tuple(choices), "none": none, "aliases": tuple(aliases)}
    return field(default=default, metadata=metadata | {"group": group})


def required(text: str, *, group: str = "") -> Any:
    """A dataclass field for an option without a default."""
    return option(MISSING, text, group=group)


def groups_of(config_class: type[Any]) -> dict[str, str]:
    """{option: heading} in the order of `--help`: a class's own options, then the inherited."""
    groups: dict[str, str] = {}
    known = {each.name: each for each in fields(config_class)}
    for owner in config_class.__mro__:
        group = ""
        for name in inspect.get_annotations(owner):
            group = known[name].metadata["group"] or group
            groups.setdefault(name, group)
    return groups


def flag(name: str) -> str:
    """The option's spelling on the command line.

    >>> flag("batch_size")
    '--batch-size'
    """
    return "--" + name.replace("_", "-")


def require(condition: bool, name: str, rule: str, value: object, remedy: str) -> None:
    """Raise `ConfigError` naming the option, the rule it breaks, its value and the remedy."""
    if not condition:
        raise ConfigError(f"{flag(name)} {rule}, got {value!r}: {remedy}")
