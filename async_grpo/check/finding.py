"""What a check says: one line that names the field, its value and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto
from typing import Literal

from async_grpo.util.errors import AsyncGrpoError


class Cost(Flag):
    """What a check takes, on an idle machine."""

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
