"""Where a run's data comes from: one source, or several files.

Each of several is a type of questions, with a share of every batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from async_grpo.config.option import QUOTED, Several, names_in, require, split_text
from async_grpo.util.errors import ConfigError

COLUMN_TYPES = ("int", "float", "bool", "str")
OUR_COLUMNS = (
    "input",
    "messages",
    "input_token_ids",
    "answer",
    "completion",
    "completion_token_ids",
    "text",
    "dataset_type",
)
KEYS = ("weight", "environment", "rewards", "teacher", "eval_path", "split", "config", "columns")
BETWEEN_FILES, BETWEEN_PARTS, BETWEEN_REWARDS = ";", ",", "+"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """The questions of one type, and what they are played, graded and taught by."""

    source: DataSource
    type: str = ""  # empty: each line says its own
    weight: float = 1.0  # of its share of every batch
    environment: str = ""  # empty: --environment
    rewards: tuple[str, ...] = ()  # empty: all that the verifiers have
    teacher: str = ""  # empty: as --teacher-for says
    held_out: DataSource | None = None
    columns: Mapping[str, str] = field(default_factory=dict)  # our names to the file's
    text: str = field(default="", compare=False)  # as --data has it


def as_text(table: Mapping[str, Any], *, option: str = "data", name: str = "type") -> str:
    """A `[[data]]` table of a run's file as `--data` is typed; raises `ConfigError`.

    `option`: whose table it is, when not that one's; `name`: the key of what stands first.

    >>> as_text({"type": "sums", "path": "s.jsonl", "weight": 2, "rewards": ["a", "b"]})
    'sums=s.jsonl,weight=2,rewards=a+b'
    """
    rest = {key: value for key, value in table.items() if key not in (name, "path")}
    for key in (name, "path"):
        is_text = isinstance(table.get(key), str)
        require(is_text, option, f"needs a {key}", table, f"add {key} = ...")
    mapping = rest.pop("column_mapping", "")
    for key, value in rest.items():
        if isinstance(value, list):
            rest[key] = BETWEEN_REWARDS.join(map(str, value))
    named = {table[name]: table["path"], **rest}
    parts = [f"{key}={_quoted(str(value))}" for key, value in named.items()]
    return ",".join([*parts, mapping] if mapping else parts)


@dataclass(frozen=True, slots=True)
class Entry:
    """What is typed of one file, in the form NAME=PATH,key=value,..."""

    option: str
    name: str
    path: str
    given: Mapping[str, str]  # {key: value}
    columns: Mapping[str, str]  # our names to the file's

    @property
    def source(self) -> DataSource:
        """What it says of where its lines are."""
        types = parse_columns(self.given.get("columns", ""), option=self.option)
        config = self.given.get("config", "")
        return DataSource(self.path, self.given.get("split", "train"), config, types)

    def listed(self, key: str) -> tuple[str, ...]:
        """The names, or the numbers, of a key that takes several."""
        return tuple(filter(None, self.given.get(key, "").split(BETWEEN_REWARDS)))


def parse_entry(text: str, *, option: str, keys: Sequence[str], what: str, example: str) -> Entry:
    """The parts of one entry, of which `keys` may be given; `what` its name says.

    Raises `ConfigError` naming the option.
    """
    parts = (part.partition("=") for part in split_text(text, BETWEEN_PARTS))
    pairs = [(key.strip(), _unquoted(value.strip())) for key, _, value in parts]
    rule, remedy = f"must be {what.upper()}=PATH,key=value,...", f"for example {example}"
    require(all(key and value for key, value in pairs), option, rule, text, remedy)
    (name, path), *rest = pairs
    given = dict(rest)
    require(len(given) == len(rest), option, "must give a key once", text, "drop one of the two")
    is_name = re.fullmatch(r"[\w.-]+", name) is not None
    rule = f"must have a {what} of letters, digits, . _ and -"
    require(is_name, option, rule, name, "name another")
    columns = {ours: given.pop(ours) for ours in OUR_COLUMNS if ours in given}
    for key in given:
        known = f"choose from {', '.join(keys)}, or name a column as input=question"
        require(key in keys, option, f"of {name} has an unknown key", key, known)
    return Entry(option, name, path, given, columns)


def data_file(text: str) -> DataFile:
    """One file of `--data`; raises `ConfigError`. Between quotes, commas are none of ours.

    >>> file = data_file("sums=s.jsonl,weight=2,rewards=countdown+mathd,input=question")
    >>> file.type, file.source.path, file.weight, file.rewards, file.columns
    ('sums', 's.jsonl', 2.0, ('countdown', 'mathd'), {'input': 'question'})
    """
    example = "sums=sums.jsonl,weight=2"
    entry = parse_entry(text, option="data", keys=KEYS, what="type", example=example)
    given, source = entry.given, entry.source
    held_out = given.get("eval_path")
    return DataFile(
        source=source,
        type=entry.name,
        weight=_weight(given.get("weight", "1"), entry.name),
        environment=given.get("environment", ""),
        rewards=entry.listed("rewards"),
        teacher=given.get("teacher", ""),
        held_out=replace(source, path=held_out) if held_out else None,
        columns=entry.columns,
        text=text,
    )


def _quoted(value: str) -> str:
    """For `split_text` and `_unquoted`, where it holds a separator."""
    if not re.search(f"[{BETWEEN_FILES}{BETWEEN_PARTS}]", value):
        return value
    return "'" + value.replace("'", "'\"'\"'") + "'"


def _unquoted(value: str) -> str:
    """What stands in quotes as a whole.

    >>> _unquoted(_quoted("agent:python agent.py '1,2'"))
    "agent:python agent.py '1,2'"
    """
    if not re.fullmatch(rf"(?:{QUOTED})+", value):
        return value
    return "".join(part[1:-1] for part in re.findall(QUOTED, value))


def _weight(text: str, kind: str) -> float:
    rule, remedy = f"of {kind} must have a positive weight", "2 is twice the share of 1"
    try:
        weight = float(text)
    except ValueError:
        raise ConfigError(f"--data {rule}, got {text!r}: {remedy}") from None
    require(0 < weight < float("inf"), "data", rule, text, remedy)
    return weight


DATA_FILES = Several(BETWEEN_FILES, data_file)
