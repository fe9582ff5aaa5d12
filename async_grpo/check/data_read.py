"""The lines of a run's data, as far as a check reads them, and what is odd about them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_grpo.check.finding import Setup, tried
from async_grpo.config.data_files import DataSource
from async_grpo.data.lines import may_be_hub_name
from async_grpo.model.model_folder import ModelFacts
from async_grpo.run.data import Part, Purpose, parts_of
from async_grpo.types import GivenPair, Question, TrainingPair
from async_grpo.util.errors import AsyncGrpoError

Record = Question | TrainingPair | GivenPair
DATA_S = 3.0  # longest time for one file; the run reads the rest

MAX_NOTED_IDS = 4096
ROLES = ("system", "user", "assistant", "tool", "developer", "function")
PROMPTS = frozenset({"input", "messages", "input_token_ids"})  # of which a line has one or another


@dataclass(slots=True)
class Notes:
    """What is odd about the lines of one source."""

    num_lines: int = 0
    num_copies: int = 0  # of an earlier line
    keys: set[int] = field(default_factory=set)  # hashes of prompt and answer
    lacking: Counter[str] = field(default_factory=Counter)  # columns of the first line of its type
    roles: Counter[str] = field(default_factory=Counter)  # of messages, that no template knows
    ids: list[int] = field(default_factory=list)  # of the first prompts
    _columns: dict[str, frozenset[str]] = field(default_factory=dict)  # by type, of its first line

    def take(
        self, row: Mapping[str, Any], ids: Sequence[int], *, answer: object, kind: str
    ) -> None:
        """Add one line, whose prompt has these token ids."""
        self.num_lines += 1
        key = hash((*ids, answer))
        self.num_copies += key in self.keys
        self.keys.add(key)
        self.ids += ids[: max(0, MAX_NOTED_IDS - len(self.ids))]
        there = frozenset(name for name, value in row.items() if value is not None)
        self.lacking.update(self._columns.setdefault(kind, there) - there - PROMPTS)
        chat = next(filter(_is_chat, row.values()), ())
        self.roles.update(str(each["role"]) for each in chat if each["role"] not in ROLES)

    def in_words(self, path: str) -> Iterator[str]:
        """A sentence for each thing that a user probably does not want."""
        if self.num_copies:
            told = f"{self.num_copies} of {self.num_lines} lines of {path} are copies of others"
            yield f"{told}: remove them, unless they are to be asked so often"
        for name, count in self.lacking.items():
            told = f"column {name} of the first line of {path} is missing in {count} later lines"
            yield f"{told}: what reads it fails there, fill it in or leave it out of all"
        for role, count in self.roles.items():
            near = get_close_matches(role, ROLES, n=1, cutoff=0.0)
            told = f"{count} messages of {path} have the role {role!r}, which templates do not know"
            yield f"{told}: correct it, the nearest is {near[0]}"


def _is_chat(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(
        isinstance(each, Mapping) and "role" in each for each in value
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRead:
    """What was read of one source of data."""

    purpose: Purpose
    source: DataSource
    num_lines: int = 0
    is_whole: bool = True  # or time was up
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [R] tokens
    firsts: Mapping[str, Record] = field(default_factory=dict)  # by dataset_type, the first record
    problem: AsyncGrpoError | None = None
    waits: str = ""  # why it cannot be read yet
    unknown: float = 0.0  # share of unknown tokens in its first prompts
    notes: Notes = field(default_factory=Notes)


def read_data(setup: Setup, model: ModelFacts) -> Iterator[DataRead]:
    """Every source of the run's data, as much of each as can be read in `DATA_S`."""
    config = setup.train.but(model_name_or_path=model.path)
    for part in parts_of(config, model):
        path, waits = part.source.path, ""
        if setup.is_prepared(path):
            waits = f"{path} is made by [launch] prepare"
        elif not os.path.exists(path) and may_be_hub_name(path):
            waits = f"{path} is read from the hub when the run loads"
        read = DataRead(purpose=part.purpose, source=part.source, waits=waits)
        yield read if waits else _read(part, read)


def _read(part: Part, unread: DataRead) -> DataRead:
    lengths: list[int] = []
    firsts: dict[str, Record] = {}
    notes, is_whole, deadline = Notes(), True, float("inf")

    def goes_on() -> bool:  # from the first line on: what reads the format is imported before it
        nonlocal is_whole, deadline
        deadline = deadline if lengths else time.monotonic() + DATA_S
        is_whole = time.monotonic() < deadline
        return is_whole

    def build(row: Mapping[str, Any]) -> Record:
        record = part.build(row)
        notes.take(row, ids_of(record), answer=answer_of(record), kind=type_of(record))
        return record

    def read() -> None:
        for record in replace(part, build=build).records(goes_on=goes_on):
            lengths.append(num_tokens(record))
            firsts.setdefault(type_of(record), record)

    problem = tried(read)
    return replace(
        unread,
        num_lines=len(lengths),
        is_whole=is_whole and not part.source.window,
        lengths=np.asarray(lengths, np.int64),
        firsts=firsts,
        problem=problem,
        notes=notes,
    )


def num_tokens(record: Record) -> int:
    """Tokens of the prompt, or of the whole pair."""
    completion = () if isinstance(record, Question) else record.completion_token_ids
    return len(_prompt_of(record)) + len(completion)


def ids_of(record: Record) -> list[int]:
    """The token ids of the prompt."""
    return [int(each) for each in _prompt_of(record)]


def _prompt_of(record: Record) -> NDArray[np.int32]:
    if isinstance(record, TrainingPair):
        return record.prompt_token_ids
    return (record.question if isinstance(record, GivenPair) else record).input_token_ids


def answer_of(record: Record) -> str | bytes | None:
    """The expected answer, or the bytes of the completion's token ids."""
    return record.answer if isinstance(record, Question) else record.completion_token_ids.tobytes()


def type_of(record: Record) -> str:
    """The dataset_type of a record; a supervised pair has none."""
    question = record.question if isinstance(record, GivenPair) else record
    return question.dataset_type if isinstance(question, Question) else ""
