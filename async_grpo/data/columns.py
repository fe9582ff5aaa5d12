"""What a line's columns mean: names that the user may map, and the checks of their values."""

from __future__ import annotations

import math
from collections.abc import Mapping

from async_grpo.config.data_files import OUR_COLUMNS
from async_grpo.config.option import require
from async_grpo.data.lines import MalformedLine, describe


def parse_column_mapping(text: str) -> dict[str, str]:
    """Our column names to the user's, from `--column-mapping`.

    Raises `ConfigError` for an unknown name of ours, or one that is given twice.

    >>> parse_column_mapping("input=question, answer=solution")
    {'input': 'question', 'answer': 'solution'}
    """
    mapping: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        ours, equals, theirs = (part.strip() for part in pair.partition("="))
        require(
            bool(equals and theirs) and ours in OUR_COLUMNS and ours not in mapping,
            "column_mapping",
            "must hold our=yours pairs",
            pair,
            f"ours are {', '.join(OUR_COLUMNS)}, each at most once: input=question,answer=solution",
        )
        mapping[ours] = theirs
    return mapping


class Columns:
    """One line seen through the column mapping; every getter raises `MalformedLine`."""

    __slots__ = ("_mapping", "_row")

    def __init__(self, row: Mapping[str, object], *, mapping: Mapping[str, str]) -> None:
        self._row = row
        self._mapping = mapping
        for ours in mapping:
            if self.name(ours) not in row:
                raise self.malformed(ours, expected="what --column-mapping names", value=None)

    def name(self, ours: str) -> str:
        """The user's name of our column."""
        return self._mapping.get(ours, ours)

    def is_mapped(self, ours: str) -> bool:
        """Whether the user has said which column it is."""
        return ours in self._mapping

    def has(self, ours: str) -> bool:
        """Whether the column is there and not null."""
        return self._row.get(self.name(ours)) is not None

    def has_only(self, ours: str) -> bool:
        """Whether every other column is missing or null."""
        return [name for name, value in self._row.items() if value is not None] == [self.name(ours)]

    def text(self, ours: str) -> str:
        """A string that holds more than white space."""
        value = self._row.get(self.name(ours))
        if not isinstance(value, str) or not value.strip():
            raise self.malformed(ours, expected="non-empty text", value=value)
        return value

    def answer(self) -> str | None:
        """Text, or a number as text; None when the line has none."""
        value = self._row.get(self.name("answer"))
        if value is None or isinstance(value, str):
            return value
        is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        if isinstance(value, bool) or not is_number:
            raise self.malformed("answer", expected="text or a number", value=value)
        return str(value)

    def dataset_type(self) -> str:
        """What chooses environment, rewards and teacher; empty when the line has none."""
        return str(self._row.get(self.name("dataset_type")) or "")

    def messages(self) -> list[dict[str, str]]:
        """Chat messages, each with a role and a content."""
        value = self._row.get(self.name("messages"))
        if not isinstance(value, list) or not value:
            raise self.malformed("messages", expected="a list of chat messages", value=value)
        for message in value:
            if not isinstance(message, dict) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise self.malformed(
                    "messages", expected="messages with a text role and content", value=message
                )
        return value

    def token_ids(self, ours: str, *, vocab_size: int) -> list[int]:
        """Token ids, each in [0, vocab_size); at least one."""
        value = self._row.get(self.name(ours))
        if not isinstance(value, list) or not value:
            raise self.malformed(ours, expected="a list of token ids", value=value)
        for token in value:
            if isinstance(token, bool) or not isinstance(token, int):
                raise self.malformed(ours, expected="whole numbers", value=token)
            if not 0 <= token < vocab_size:
                raise self.malformed(
                    ours, expected=f"token ids from 0 to {vocab_size - 1}", value=token
                )
        return value

    def malformed(self, ours: str, *, expected: str, value: object) -> MalformedLine:
        """The error for a column of this line, named as the user names it."""
        name = self.name(ours)
        there = f"only columns {', '.join(self._row)} (see --column-mapping)"
        got = describe(value) if name in self._row else there
        return MalformedLine(name, expected=expected, got=got)
