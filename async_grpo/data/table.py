"""Records by index: a million of them in two arrays, in the layout of an Arrow column.

One array holds the bytes of all records end to end, the other where each ends. Every read makes a
new record. Ray shares the arrays with other processes of the same machine without a copy, and
never passes on an object for each record.
"""

from __future__ import annotations

import logging
import pickle
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from async_grpo.types import GivenPair, Question, TrainingPair

logger = logging.getLogger(__name__)
T = TypeVar("T")


class _Table(Sequence[T]):
    __slots__ = ("_content", "_ends", "longest_prompt")

    def __init__(
        self, content: NDArray[np.uint8], ends: NDArray[np.int64], longest_prompt: int
    ) -> None:
        """`ends` [R+1] in bytes, the first is 0; `longest_prompt` in tokens, 0 without any."""
        self._content, self._ends, self.longest_prompt = content, ends, longest_prompt

    @classmethod
    def of(cls, records: Iterable[T]) -> Self:
        """A table of the records, which are read one by one."""
        content, ends, longest_prompt = bytearray(), array("q", [0]), 0
        for record in records:
            prompt, *rest = cls._pack(record)
            # Pickled, because a user's columns may hold values of any type.
            content += pickle.dumps((prompt, *rest))
            ends.append(len(content))
            longest_prompt = max(longest_prompt, len(prompt) // np.dtype(np.int32).itemsize)
        return cls(np.frombuffer(content, np.uint8), np.frombuffer(ends, np.int64), longest_prompt)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> T:  # type: ignore[override]  # slices are not used
        if not 0 <= index < len(self):
            raise IndexError(f"a table of {len(self)} records has none at {index}")
        packed = self._content[self._ends[index] : self._ends[index + 1]]
        return self._unpack(*pickle.loads(packed.data))

    @staticmethod
    @abstractmethod
    def _pack(record: T) -> tuple[bytes, *tuple[object, ...]]:
        """The bytes of the prompt's int32 ids, then the rest of the record."""

    @staticmethod
    @abstractmethod
    def _unpack(prompt: bytes, *rest: object) -> T: ...


class QuestionTable(_Table[Question]):
    """Prompts, each with everything else that its line holds."""

    __slots__ = ()

    @staticmethod
    def _pack(record: Question) -> tuple[bytes, *tuple[object, ...]]:
        rest = record.input, record.answer, record.columns, record.dataset_type
        has_reference = record.reference_token_ids is not None
        own = (record.reference_token_ids, record.reference) if has_reference else ()
        return record.input_token_ids.tobytes(), *rest, *own

    @staticmethod
    def _unpack(prompt: bytes, *rest: Any) -> Question:
        return Question(np.frombuffer(prompt, np.int32), *rest)


class PairTable(_Table[TrainingPair]):
    """Prompts and completions of supervised training."""

    __slots__ = ()

    @staticmethod
    def _pack(record: TrainingPair) -> tuple[bytes, *tuple[object, ...]]:
        return record.prompt_token_ids.tobytes(), record.completion_token_ids.tobytes()

    @staticmethod
    def _unpack(prompt: bytes, *rest: Any) -> TrainingPair:
        return TrainingPair(*(np.frombuffer(ids, np.int32) for ids in (prompt, *rest)))


class GivenTable(_Table[GivenPair]):
    """Prompts and completions of given pairs, each with everything else that its line holds."""

    __slots__ = ()

    @property
    def longest(self) -> int:
        """Prompt and completion tokens of the longest pair; 0 without any."""
        return max((pair.num_tokens for pair in self), default=0)

    @staticmethod
    def _pack(record: GivenPair) -> tuple[bytes, *tuple[object, ...]]:
        completion = record.completion_token_ids.tobytes()
        return *QuestionTable._pack(record.question), completion, record.completion

    @staticmethod
    def _unpack(prompt: bytes, *rest: Any) -> GivenPair:
        *question, completion, text = rest
        ids = np.frombuffer(completion, np.int32)
        return GivenPair(QuestionTable._unpack(prompt, *question), ids, text)


def blocks_of(documents: Iterable[TrainingPair], *, size: int) -> Iterator[TrainingPair]:
    """The documents' tokens end to end, cut into blocks, of which all but the first are trained.

    Each block has `size` tokens, the last one what is left; a lone last token is left out.

    >>> pair = TrainingPair(np.array([5], np.int32), np.array([6, 7, 8], np.int32))
    >>> [(*block.prompt_token_ids.tolist(), block.completion_token_ids.tolist())
    ...  for block in blocks_of([pair, pair], size=3)]
    [(5, [6, 7]), (8, [5, 6]), (7, [8])]
    """
    left, num_tokens, num_documents, num_blank = np.zeros(0, np.int32), 0, 0, 0
    for each in documents:
        ids = np.concatenate((left, each.prompt_token_ids, each.completion_token_ids))
        num_documents += 1
        num_blank += len(ids) == len(left)
        num_tokens += len(ids) - len(left)
        num_cut = len(ids) // size * size
        for block in ids[:num_cut].reshape(-1, size):
            yield TrainingPair(block[:1], block[1:])
        left = ids[num_cut:]
    if len(left) > 1:
        yield TrainingPair(left[:1], left[1:])
    logger.info(
        "%d texts with %d tokens, in blocks of %d; left out: %d blank texts, the last %d tokens",
        num_documents, num_tokens, size, num_blank, len(left) == 1,
    )  # fmt: skip
