"""The options of a run's questions: their files, and what plays them.

With several files each holds one type of questions, which gets a share of every batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from async_grpo.config.option import (
    AT_LEAST_1,
    QUOTED,
    Change,
    Options,
    Several,
    names_in,
    option,
    require,
    split_text,
)
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
    """A JSONL file, a pattern of files, or anything that `datasets.load_dataset` reads."""

    path: str
    split: str = "train"
    config: str = ""  # empty: its only one
    columns: Mapping[str, str] = field(default_factory=dict)  # type by column, of COLUMN_TYPES
    window: int = 0  # lines that are read at a time, of files that keep them; 0: all, into memory
    whole_texts: bool = False  # a .txt file is one text, and not one a line


def parse_columns(text: str, *, option_name: str = "columns") -> dict[str, str]:
    """{column of the file: type}; raises `ConfigError` that names the option.

    >>> parse_columns("level=int, share=float")
    {'level': 'int', 'share': 'float'}
    """
    pairs = [pair.rpartition("=") for pair in names_in(text)]
    for name, _, kind in pairs:
        rule = "must hold pairs of a column and its type, each column once"
        is_new = [other for other, _, _ in pairs].count(name) == 1
        known = f"types are {', '.join(COLUMN_TYPES)}: level=int,share=float"
        require(bool(name) and kind in COLUMN_TYPES and is_new, option_name, rule, text, known)
    return {name.strip(): kind for name, _, kind in pairs}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """The questions of one type, with their environment, rewards and teacher."""

    source: DataSource
    type: str = ""  # empty: each line says its own
    weight: float = 1.0  # of its share of every batch
    environment: str = ""  # empty: --environment
    rewards: tuple[str, ...] = ()  # empty: all that the verifiers have
    teacher: str = ""  # empty: as --teacher-for says
    held_out: DataSource | None = None
    columns: Mapping[str, str] = field(default_factory=dict)  # our names to the file's
    text: str = field(default="", compare=False)  # as --data has it


def as_text(table: Mapping[str, Any], *, option_name: str = "data", name: str = "type") -> str:
    """Write a `[[data]]` table of a run's file as a value of `--data`; raises `ConfigError`.

    `option_name`: the option that the table belongs to; `name`: the key of the entry's name.

    >>> as_text({"type": "sums", "path": "s.jsonl", "weight": 2, "rewards": ["a", "b"]})
    'sums=s.jsonl,weight=2,rewards=a+b'
    """
    rest = {key: value for key, value in table.items() if key not in (name, "path")}
    for key in (name, "path"):
        is_text = isinstance(table.get(key), str)
        require(is_text, option_name, f"needs a {key}", table, f"add {key} = ...")
    mapping = rest.pop("column_mapping", "")
    for key, value in rest.items():
        if isinstance(value, list):
            rest[key] = BETWEEN_REWARDS.join(map(str, value))
    named = {table[name]: table["path"], **rest}
    parts = [f"{key}={_quoted(str(value))}" for key, value in named.items()]
    return ",".join([*parts, mapping] if mapping else parts)


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of `--data` or `--eval`: NAME=PATH,key=value,..."""

    option: str
    name: str
    path: str
    given: Mapping[str, str]  # {key: value}
    columns: Mapping[str, str]  # our names to the file's

    @property
    def source(self) -> DataSource:
        """Where the lines of this entry are read from."""
        types = parse_columns(self.given.get("columns", ""), option_name=self.option)
        config = self.given.get("config", "")
        return DataSource(self.path, self.given.get("split", "train"), config, types)

    def listed(self, key: str) -> tuple[str, ...]:
        """The values of a key that takes several, joined by +."""
        return tuple(split_text(self.given.get(key, ""), BETWEEN_REWARDS))


def parse_entry(
    text: str, *, option_name: str, keys: Sequence[str], what: str, example: str
) -> Entry:
    """Parse one entry, which may give `keys`; `what` its name stands for, for messages.

    Raises `ConfigError` naming the option.
    """
    parts = (part.partition("=") for part in split_text(text, BETWEEN_PARTS))
    pairs = [(key.strip(), _unquoted(value.strip())) for key, _, value in parts]
    rule, remedy = f"must be {what.upper()}=PATH,key=value,...", f"for example {example}"
    require(all(key and value for key, value in pairs), option_name, rule, text, remedy)
    (name, path), *rest = pairs
    given = dict(rest)
    require(
        len(given) == len(rest), option_name, "must give a key once", text, "drop one of the two"
    )
    is_name = re.fullmatch(r"[\w.-]+", name) is not None
    rule = f"must have a {what} of letters, digits, . _ and -"
    require(is_name, option_name, rule, name, "name another")
    columns = {ours: given.pop(ours) for ours in OUR_COLUMNS if ours in given}
    for key in given:
        known = f"choose from {', '.join(keys)}, or name a column as input=question"
        require(key in keys, option_name, f"of {name} has an unknown key", key, known)
    return Entry(option_name, name, path, given, columns)


def data_file(text: str) -> DataFile:
    """Parse one value of `--data`; raises `ConfigError`. Commas between quotes do not separate.

    >>> file = data_file("sums=s.jsonl,weight=2,rewards=countdown+mathd,input=question")
    >>> file.type, file.source.path, file.weight, file.rewards, file.columns
    ('sums', 's.jsonl', 2.0, ('countdown', 'mathd'), {'input': 'question'})
    """
    example = "sums=sums.jsonl,weight=2"
    entry = parse_entry(text, option_name="data", keys=KEYS, what="type", example=example)
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
    """Quote a value that holds a separator, for `split_text` and `_unquoted`."""
    if not re.search(f"[{BETWEEN_FILES}{BETWEEN_PARTS}]", value):
        return value
    return "'" + value.replace("'", "'\"'\"'") + "'"


def _unquoted(value: str) -> str:
    """Remove the quotes of a value that is quoted as a whole.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions(Options):
    """The options of the question files, and of the environments that play them."""

    data_path: str = option("", change=Change.PLACE, group="The run and its data")
    """JSONL file, a pattern of files such as "part-*.jsonl", or anything datasets.load_dataset
    reads; several kinds: --data"""
    data: tuple[DataFile, ...] = option((), several=DATA_FILES, change=Change.FIXED)
    """TYPE=PATH,key=value,...: a data file in the place of --data-path, whose questions are of that
    dataset_type; give it once for each type. Keys: weight of its share of every batch (1),
    environment, rewards (names with + between), teacher, eval_path, split, config, columns (types),
    and names of columns as input=question"""
    data_split: str = option("train")
    """split of a datasets.load_dataset source"""
    data_config: str = option("")
    """configuration of a datasets.load_dataset source that has several, such as main"""
    column_mapping: str = option("")
    """our=yours pairs for other column names, such as input=question,answer=solution"""
    columns: str = option("")
    """column=type pairs for values to convert, such as level=int,share=float; or bool, str. In CSV
    all else is text"""
    infinite_sampler_seed: int = option(37, must="", change=Change.FIXED)
    """seed of the endless permutation of the questions, and of the weights of --init random"""
    data_order: str = option("index", choices=("index", "window"), change=Change.FIXED)
    """index: lines are read into memory, checked, and shuffled as a whole; window: they stay in
    their JSONL or Parquet files, which may be larger than memory, and are checked when they come:
    windows of lines in random order, each shuffled"""
    data_window: int = option(16384, must=AT_LEAST_1, change=Change.FIXED)
    """lines of a window of --data-order window: the more, the better shuffled"""
    block_size: int = option(0, change=Change.FIXED)
    """sft: tokens of the blocks that texts are cut into, end to end, instead of a text a sequence;
    0: each line is a sequence of its own"""
    max_prompt_tokens: int = option(0)
    """longest prompt of a question, in tokens; 0: what --max-tokens-per-gpu and the model leave
    beside an answer. With --data-order window workers must serve it"""
    environment: str = option("single_turn", change=Change.FIXED)
    """how questions are played: single_turn, or on workers of --mode environment: your own class,
    or an asynchronous reward of one turn, package.module:Name, path/to/file.py:Name,
    file.py:Name(size=4); an agent of OpenAI's protocol, agent:COMMAND, or agent:URL of one that
    grades itself; a taskset of verifiers, "verifiers:PYTHON TASKSET"; or an OpenEnv server,
    openenv:URL"""
    judges: str = option("", change=Change.FIXED)
    """comma-separated names of the judges that environments ask: workers of --mode judge"""
    renderer: str = option("auto", change=Change.FIXED)
    """how environments write messages as tokens: auto; template, by the model's chat template; or
    a family of models of the package renderers"""

    def check(self) -> None:
        """See `Options`."""
        for kind in self.types:
            rule = "must have one file for each type"
            require(self.types.count(kind) == 1, "data", rule, kind, "give each type once")
        if bool(self.data_path) == bool(self.data):
            rule = "must be given, or --data for each of several files, and not both"
            raise self.refusal("data_path", rule, "name one file, or all with their types")
        if self.block_size == 1:
            rule = "must be at least 2, the first token of a block is not trained"
            raise self.refusal("block_size", rule, "1024 is usual, 0 cuts nothing")
        if self.block_size and self.data_order == "window":
            rule = "must be 0 with --data-order window, whose lines stay in their files"
            raise self.refusal("block_size", rule, "leave out one of the two")

    @property
    def data_files(self) -> tuple[DataFile, ...]:
        """The training files: one for each type, or one whose lines may name their type."""
        types = parse_columns(self.columns)
        source = DataSource(self.data_path, self.data_split, self.data_config, types)
        return self.data or (DataFile(source=source),)

    @property
    def window(self) -> int:
        """`DataSource.window` of the training files."""
        return self.data_window if self.data_order == "window" else 0

    @property
    def data_paths(self) -> str:
        """Paths of the training files, for messages."""
        return ", ".join(file.source.path for file in self.data_files)

    @property
    def types(self) -> tuple[str, ...]:
        """Types of --data, in order; empty with --data-path."""
        return tuple(file.type for file in self.data)

    def file_of(self, dataset_type: str) -> DataFile:
        """The file that holds the questions of a type."""
        return next(each for each in self.data_files if each.type in ("", dataset_type))

    def rewards_of(self, dataset_type: str) -> tuple[str, ...]:
        """The rewards that grade the questions of a type; none: all that the verifiers have."""
        return self.file_of(dataset_type).rewards

    @property
    def environments(self) -> set[str]:
        """Names of the environments that play training questions."""
        return {each.environment or self.environment for each in self.data_files}

    def environment_of(self, dataset_type: str) -> str:
        """The name of the environment that plays the questions of a type."""
        return self.file_of(dataset_type).environment or self.environment

    @property
    def judge_names(self) -> tuple[str, ...]:
        """Names given by --judges."""
        return names_in(self.judges)

    @property
    def file_teachers(self) -> dict[str, str]:
        """{dataset_type: name of its teacher}, as data files name them."""
        return {file.type: file.teacher for file in self.data_files if file.teacher}
