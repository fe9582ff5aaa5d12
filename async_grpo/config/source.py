"""Where a run's data comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from async_grpo.config.option import names_in, require

COLUMN_TYPES = ("int", "float", "bool", "str")


@dataclass(frozen=True, slots=True)
class DataSource:
    """A file, or what `datasets.load_dataset` reads of a name or a folder."""

    path: str
    split: str = "train"
    config: str = ""  # empty: its only one
    columns: Mapping[str, str] = field(default_factory=dict)  # type by column, of COLUMN_TYPES


def parse_columns(text: str, *, option: str = "columns") -> dict[str, str]:
    """Types by column, in the file's own names; raises `ConfigError` that names the option.

    >>> parse_columns("level=int, share=float")
    {'level': 'int', 'share': 'float'}
    """
    pairs = [pair.rpartition("=") for pair in names_in(text)]
    for name, _, kind in pairs:
        rule = "must hold pairs of a column and its type, each column once"
        is_new = [other for other, _, _ in pairs].count(name) == 1
        known = f"types are {', '.join(COLUMN_TYPES)}: level=int,share=float"
        require(bool(name) and kind in COLUMN_TYPES and is_new, option, rule, text, known)
    return {name.strip(): kind for name, _, kind in pairs}
