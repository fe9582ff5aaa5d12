"""How an option is declared: a typed dataclass field with its help, from which the CLI is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

from async_grpo.errors import ConfigError


def option(default: Any, text: str, *, choices: Sequence[str] = ()) -> Any:
    """A dataclass field for one option; `text` is its help and `choices` its legal values."""
    return field(default=default, metadata={"help": text, "choices": tuple(choices)})


def required(text: str) -> Any:
    """A dataclass field for an option without a default."""
    return field(metadata={"help": text, "choices": ()})


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
