"""Records by index: a million of them in four arrays, in the layout of an Arrow table.

A column is its values end to end, and where each record's end. A record is made when it is read,
and nobody keeps it; its token ids are a view. Ray hands the arrays to another process on the same
machine without a copy, and nowhere as an object a record.
"""

from __future__ import annotations

import pickle
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from async_grpo.types import Question, TrainingPair

T = TypeVar("T")


class _Column(NamedTuple):
    values: NDArray[np.uint8]
    ends: NDArray[np.int64]  # [R+1], in bytes; the first is 0

    def part(self, index: int) -> NDArray[np.uint8]:
        return self.values[self.ends[index] : self.ends[index + 1]]


class _Table(Sequence[T]):
    """Records of two parts, token ids and bytes of any kind."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: _Column, second: _Column) -> None:
        self._first, self._second = first, second

    @classmethod
    def of(cls, records: Iterable[T]) -> Self:
        """A table of the records, which are looked at one by one."""
        contents, ends = (bytearray(), bytearray()), (array("q", [0]), array("q", [0]))
        for record in records:
            for content, end, part in zip(contents, ends, cls._pack(record), strict=True):
                content += part
                end.append(len(content))
        columns = [
            _Column(np.frombuffer(bytes_, np.uint8), np.frombuffer(end, np.int64))
            for bytes_, end in zip(contents, ends, strict=True)
        ]
        return cls(*columns)

    def __len__(self) -> int:
        return len(self._first.ends) - 1

    def __getitem__(self, index: int) -> T:  # type: ignore[override]  # slices have no use here
        if not 0 <= index < len(self):
            raise IndexError(f"a table of {len(self)} records has none at {index}")
        return self._unpack(self._first.part(index).view(np.int32), self._second.part(index))

    @staticmethod
    @abstractmethod
    def _pack(record: T) -> tuple[bytes, bytes]: ...

    @staticmethod
    @abstractmethod
    def _unpack(ids: NDArray[np.int32], rest: NDArray[np.uint8]) -> T: ...


class QuestionTable(_Table[Question]):
    """Prompts, and beside each everything else that its line holds."""

    __slots__ = ()

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt; 0 without any."""
        return int(np.diff(self._first.ends).max(initial=0)) // np.dtype(np.int32).itemsize

    @staticmethod
    def _pack(record: Question) -> tuple[bytes, bytes]:
        # Pickled, because a user's columns may hold what no schema has; shared texts stay shared.
        rest = (record.input, record.answer, record.columns)
        return _bytes_of(record.input_token_ids), pickle.dumps(rest)

    @staticmethod
    def _unpack(ids: NDArray[np.int32], rest: NDArray[np.uint8]) -> Question:
        return Question(ids, *pickle.loads(rest.data))


class PairTable(_Table[TrainingPair]):
    """Prompts and completions of supervised training."""

    __slots__ = ()

    @staticmethod
    def _pack(record: TrainingPair) -> tuple[bytes, bytes]:
        return _bytes_of(record.prompt_token_ids), _bytes_of(record.completion_token_ids)

    @staticmethod
    def _unpack(ids: NDArray[np.int32], rest: NDArray[np.uint8]) -> TrainingPair:
        return TrainingPair(ids, rest.view(np.int32))


def _bytes_of(ids: NDArray[np.int32]) -> bytes:
    return np.asarray(ids, dtype=np.int32).tobytes()
