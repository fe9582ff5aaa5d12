"""What is odd about the lines of a source, noted while they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

MAX_NOTED_IDS = 4096
ROLES = ("system", "user", "assistant", "tool", "developer", "function")
PROMPTS = frozenset({"input", "messages", "input_token_ids"})  # of which a line has one or another


@dataclass(slots=True)
class Notes:
    """Of one source."""

    num_lines: int = 0
    num_copies: int = 0  # of an earlier line
    keys: set[int] = field(default_factory=set)  # of each prompt with its answer
    lacking: Counter[str] = field(default_factory=Counter)  # columns of the first line of its type
    roles: Counter[str] = field(default_factory=Counter)  # that are none
    ids: list[int] = field(default_factory=list)  # of the first prompts
    _columns: dict[str, frozenset[str]] = field(default_factory=dict)  # by type, of its first line

    def take(
        self, row: Mapping[str, Any], ids: Sequence[int], *, answer: object, kind: str
    ) -> None:
        """One more line, whose prompt has these token ids."""
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
