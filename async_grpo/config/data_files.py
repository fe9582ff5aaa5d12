"""Several data files in one run: each is a type of questions, with a share of every batch."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from async_grpo.config.option import require
from async_grpo.config.source import DataSource
from async_grpo.errors import ConfigError

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
KEYS = ("weight", "environment", "rewards", "teacher", "eval_path", "split", "config")
BETWEEN_FILES, BETWEEN_PARTS, BETWEEN_REWARDS = ";", ",", "+"
QUOTED = r"""'[^']*'|"[^"]*\""""


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


@functools.cache
def parse_data_files(text: str) -> tuple[DataFile, ...]:
    """The files of `--data`; raises `ConfigError`. Between quotes, commas are none of ours.

    >>> [file] = parse_data_files("sums=s.jsonl,weight=2,rewards=countdown+mathd,input=question")
    >>> file.type, file.source.path, file.weight, file.rewards, file.columns
    ('sums', 's.jsonl', 2.0, ('countdown', 'mathd'), {'input': 'question'})
    """
    files = tuple(_parse(each) for each in split_text(text, BETWEEN_FILES) if each.strip())
    types = [file.type for file in files]
    for kind in types:
        rule = "must have one file for each type"
        require(types.count(kind) == 1, "data", rule, kind, "give each type once")
    return files


def as_text(table: Mapping[str, Any]) -> str:
    """A `[[data]]` table of a run's file as `--data` is typed; raises `ConfigError`.

    >>> as_text({"type": "sums", "path": "s.jsonl", "weight": 2, "rewards": ["a", "b"]})
    'sums=s.jsonl,weight=2,rewards=a+b'
    """
    rest = {key: value for key, value in table.items() if key not in ("type", "path")}
    for key in ("type", "path"):
        require(
            isinstance(table.get(key), str), "data", f"needs a {key}", table, f"add {key} = ..."
        )
    mapping = rest.pop("column_mapping", "")
    rewards = rest.get("rewards")
    if isinstance(rewards, list):
        rest["rewards"] = BETWEEN_REWARDS.join(rewards)
    named = {table["type"]: table["path"], **rest}
    parts = [f"{key}={_quoted(str(value))}" for key, value in named.items()]
    return ",".join([*parts, mapping] if mapping else parts)


def _parse(text: str) -> DataFile:
    parts = (part.partition("=") for part in split_text(text, BETWEEN_PARTS))
    pairs = [(key.strip(), _unquoted(value.strip())) for key, _, value in parts]
    rule, remedy = "must be TYPE=PATH,key=value,...", "for example sums=sums.jsonl,weight=2"
    require(all(key and value for key, value in pairs), "data", rule, text, remedy)
    (kind, path), *rest = pairs
    given = dict(rest)
    require(len(given) == len(rest), "data", "must give a key once", text, "drop one of the two")
    require(
        re.fullmatch(r"[\w.-]+", kind) is not None,
        "data", "must have a type of letters, digits, . _ and -", kind, "name another",
    )  # fmt: skip
    columns = {ours: given.pop(ours) for ours in OUR_COLUMNS if ours in given}
    for key in given:
        known = f"choose from {', '.join(KEYS)}, or name a column as input=question"
        require(key in KEYS, "data", f"of {kind} has an unknown key", key, known)
    split, config = given.get("split", "train"), given.get("config", "")
    held_out = given.get("eval_path")
    return DataFile(
        source=DataSource(path, split, config),
        type=kind,
        weight=_weight(given.get("weight", "1"), kind),
        environment=given.get("environment", ""),
        rewards=tuple(filter(None, given.get("rewards", "").split(BETWEEN_REWARDS))),
        teacher=given.get("teacher", ""),
        held_out=DataSource(held_out, split, config) if held_out else None,
        columns=columns,
    )


def split_text(text: str, between: str) -> list[str]:
    """The parts, at separators that do not stand between quotes.

    >>> split_text("a=b,environment=agent:python agent.py '1,2',c=d", ",")
    ['a=b', "environment=agent:python agent.py '1,2'", 'c=d']
    """
    return re.findall(rf"(?:{QUOTED}|[^{between}])+", text)


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
