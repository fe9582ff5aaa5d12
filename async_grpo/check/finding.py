"""The input of a check, a run as its file describes it, and its findings.

A finding is one line that names the field, its value and what to do.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Flag, auto
from fnmatch import fnmatch
from glob import glob
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from async_grpo.model.model_folder import first_line
from async_grpo.util.errors import AsyncGrpoError

if TYPE_CHECKING:
    from async_grpo.config.train_config import TrainConfig
    from async_grpo.config.worker_config import WorkerConfig

T = TypeVar("T")
Known: TypeAlias = T | AsyncGrpoError


class Cost(Flag):
    """How long a check takes on an idle machine."""

    AT_ONCE = auto()  # options, names and heads of files: a second or two, with no process
    SECONDS = auto()  # tokenizers, lines, weights, and rewards in processes of their own


EVERYTHING = Cost.AT_ONCE | Cost.SECONDS
# waits: cannot be looked at before `prepare` has run, or before the run has fetched it.
Level = Literal["ok", "waits", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `async-grpo check`."""

    level: Level
    subject: str  # data, model, batch, ...
    text: str

    def __str__(self) -> str:
        return f"{self.level:<8} {self.subject:<11} {self.text}"


def refused(subject: str, error: AsyncGrpoError) -> list[Finding]:
    """The findings of an error that a run would end with: one a line of it."""
    return [Finding("error", subject, " ".join(line.split())) for line in str(error).splitlines()]


def stated(subject: str, fact: Known[str], *, rest: str = "", level: Level = "ok") -> list[Finding]:
    """A finding of the fact with `rest` behind it, or of the error that hides it."""
    if isinstance(fact, AsyncGrpoError):
        return refused(subject, fact)
    return [Finding(level, subject, fact + rest)] if fact else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A run as its file and options describe it."""

    train: TrainConfig
    workers: tuple[WorkerConfig, ...] = ()
    num_ranks: int = 1
    prepare: tuple[tuple[str, ...], ...] = ()  # commands, one after the other
    ray_address: str = ""  # empty: a head of its own, or the trainer's
    file: str = ""
    trusted: bool = False  # its code may run unconfined, and use the network
    given_cpus: int = 0  # of Ray, as the user gave them; 0: all of this machine
    plot: Mapping[str, Any] = field(default_factory=dict)  # the table of its picture; empty: none
    types_overwrite: bool = False  # or a file alone says it

    @property
    def starts_head(self) -> bool:
        """Whether it needs a Ray cluster of its own."""
        return bool(self.workers) and not self.ray_address

    @property
    def learns_from_pairs(self) -> bool:
        """Whether it needs neither cluster nor workers; False for an algorithm that is refused."""
        from async_grpo.algorithms.find import find_algorithm  # imports numpy: not for --help

        algorithm = tried(lambda: find_algorithm(self.train))
        return not isinstance(algorithm, AsyncGrpoError) and algorithm.learns_from_pairs

    def is_prepared(self, path: str) -> bool:
        """Whether `prepare` makes what does not exist at a path, to all appearances."""
        words = [word for command in self.prepare for word in command]
        named = re.compile(rf"(?<![\w./-]){re.escape(path)}(?![\w/-])")  # in a script, or after =
        made = any(
            named.search(word) or path.startswith(f"{word}/") or fnmatch(word, path)
            for word in words
        )
        return made and not os.path.exists(path) and not glob(path)


def tried(look: Callable[[], T]) -> Known[T]:
    """Call `look`; return its result or its error; other exceptions become AsyncGrpoError."""
    try:
        return look()
    except AsyncGrpoError as error:
        return error
    except Exception as error:  # other people's files, read by other people's libraries
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return AsyncGrpoError(
            f"it cannot be looked at, {type(error).__name__}: {first_line(error)} "
            f"({os.path.basename(frame.filename)}:{frame.lineno}): correct the file that this is of"
        )
