"""What must be the same when a run goes on: sha256 of the data as loaded.

The data's hash is over what the run makes of it, in order, so that any change of a line shows, and
another path or format of the same data does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from async_grpo.types import GivenPair, Question, TrainingPair

Record = Question | TrainingPair | GivenPair


def hash_data(records: Sequence[Record]) -> str:
    """Over every record, in order: token ids, texts and columns."""
    digest = hashlib.sha256()
    for record in records:
        for part in _parts(record):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _parts(record: Record) -> Iterable[bytes]:
    if isinstance(record, GivenPair):
        return *_parts(record.question), _ids(record.completion_token_ids)
    if isinstance(record, TrainingPair):
        return _ids(record.prompt_token_ids), _ids(record.completion_token_ids)
    # Columns may hold what a dataset decodes to; its text tells values apart well enough.
    text = json.dumps([record.input, record.answer, record.columns], sort_keys=True, default=str)
    return _ids(record.input_token_ids), text.encode()


def _ids(values: NDArray[np.int32]) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()
