"""One rank's minibatch as bytes and back, exactly, and a file of records that hold them.

All is kept that `model.collate` reads of a minibatch: arrays of all rows lie end to end, as
safetensors, and nothing is pickled. Texts, the questions' columns and the versions of the weights
stay behind (the dump of samples has them).

A file is only appended to. Its records have JSON and an array part each, with a checksum:

    magic "AGR1" | crc32 | bytes of JSON | bytes of arrays | JSON | arrays | magic …

A process that is killed leaves at most one record that is cut short, at the end.

Legend: S rows, P prompt tokens and L output tokens of all rows.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from async_grpo.types import Episode, Minibatch, Question, Row, Sample, Verdict
from async_grpo.util.errors import DataError

# Of teachers: a step of them would be many times as large as a checkpoint.
TOO_LARGE = ("teacher.hidden", "teacher.logits")
SCORES, HAS = "scores.", "has."  # and a name

Arrays = dict[str, NDArray[np.generic]]
MAGIC = b"AGR1"
HEAD = struct.Struct("<4sIIQ")


def without_too_large(minibatch: Minibatch) -> tuple[Minibatch, list[str]]:
    """The minibatch as it can be kept, and which scores it lacks to be trained again."""
    names = {name for sample in minibatch.samples for name in sample.scores}
    left_out = sorted(names & {*TOO_LARGE})
    if not left_out:
        return minibatch, left_out
    samples = (
        replace(sample, scores={n: v for n, v in sample.scores.items() if n not in left_out})
        for sample in minibatch.samples
    )
    return replace(minibatch, samples=tuple(samples)), left_out


def encode(minibatch: Minibatch) -> bytes:
    """The minibatch as `decode` gives it back; 9 bytes an output token and 4 a prompt token."""
    parts = minibatch.parts()
    return save(_arrays(parts) if parts else {})


def decode(content: bytes, *, round_index: int) -> Minibatch:
    """What `encode` wrote; one row a sample, as ranks receive them."""
    arrays = load(content)
    if not arrays:
        return Minibatch(round_index, ())
    prompts = np.split(arrays["prompt_ids"], np.cumsum(arrays["prompt_lengths"])[:-1])
    ends = np.cumsum(arrays["output_lengths"])
    rows = zip(prompts, ends - arrays["output_lengths"], ends, strict=True)
    samples = (
        _sample(number, prompt, slice(start, end), arrays)
        for number, (prompt, start, end) in enumerate(rows)
    )
    return Minibatch(round_index, tuple(samples))


def _arrays(parts: Sequence[Sample]) -> Arrays:
    rows = [part.episode.rows[0] for part in parts]
    found: Arrays = {
        "prompt_ids": np.concatenate([row.prompt_token_ids for row in rows]),  # [P] int32
        "prompt_lengths": np.array([len(row.prompt_token_ids) for row in rows]),  # [S]
        "output_ids": np.concatenate([row.token_ids for row in rows]),  # [L] int32
        "output_lengths": np.array([len(row.token_ids) for row in rows]),  # [S]
        "loss_mask": np.concatenate([row.loss_mask for row in rows]),  # [L] bool
        "behaviour_logprobs": np.concatenate([_logprobs(row) for row in rows]),  # [L] float32
        "is_given": np.array([row.logprobs is None for row in rows]),  # [S] bool
        "keys": np.array([part.key for part in parts], np.int64),  # [S, 4]
        "num_trained_elsewhere": np.array([part.num_trained_elsewhere for part in parts]),  # [S]
        "rewards": np.array([part.verdict.reward for part in parts], np.float64),  # [S]
    }
    return found | _advantages(parts) | _scores(parts)


def _logprobs(row: Row) -> NDArray[np.float32]:
    return np.zeros(len(row.token_ids), np.float32) if row.logprobs is None else row.logprobs


def _advantages(parts: Sequence[Sample]) -> Arrays:
    """A number a row [S], and where any row has one a token, [L] too."""
    by_token = [isinstance(part.advantage, np.ndarray) for part in parts]
    numbers = [
        0.0 if tokens else part.advantage for part, tokens in zip(parts, by_token, strict=True)
    ]
    found: Arrays = {"advantages": np.array(numbers, np.float64)}
    if any(by_token):
        found["by_token"] = np.array(by_token)
        lengths = [len(part.episode.rows[0].token_ids) for part in parts]
        values = [
            part.advantage if isinstance(part.advantage, np.ndarray) else np.zeros(n, np.float32)
            for part, n in zip(parts, lengths, strict=True)
        ]
        found["token_advantages"] = np.concatenate(values)
    return found


def _scores(parts: Sequence[Sample]) -> Arrays:
    """Of each name an array [L] or [L, K]; zeros for rows that have none, which [S] tells."""
    found: Arrays = {}
    names = dict.fromkeys(name for part in parts for name in part.scores)
    for name in names:
        known = next(part.scores[name] for part in parts if name in part.scores)
        own = [
            part.scores.get(
                name, np.zeros((len(part.episode.rows[0].token_ids), *known.shape[1:]), known.dtype)
            )
            for part in parts
        ]
        found[SCORES + name] = np.concatenate(own)
        found[HAS + name] = np.array([name in part.scores for part in parts])
    return found


def _sample(
    number: int, prompt: NDArray[np.int32], own: slice, arrays: Mapping[str, Any]
) -> Sample:
    """Row `number`, whose output tokens are `own`."""
    ordinal, attempt, index, row = map(int, arrays["keys"][number])
    logprobs = None if arrays["is_given"][number] else arrays["behaviour_logprobs"][own]
    by_token = "by_token" in arrays and arrays["by_token"][number]
    names = [key.removeprefix(SCORES) for key in arrays if key.startswith(SCORES)]
    return Sample(
        ordinal,
        index,
        Question(prompt, input="", answer=None, columns={}),
        Episode((Row(prompt, arrays["output_ids"][own], logprobs, arrays["loss_mask"][own], ()),)),
        Verdict("scored", float(arrays["rewards"][number]), None, "", "", 0.0),
        arrays["token_advantages"][own] if by_token else float(arrays["advantages"][number]),
        {name: arrays[SCORES + name][own] for name in names if arrays[HAS + name][number]},
        attempt=attempt,
        row=row,
        num_trained_elsewhere=int(arrays["num_trained_elsewhere"][number]),
    )


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a record lies."""

    path: Path
    start: int  # of the head, in bytes
    checksum: int
    text: bytes  # JSON
    num_array_bytes: int

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.start + HEAD.size + len(self.text) + self.num_array_bytes

    @property
    def facts(self) -> dict[str, Any]:
        """The JSON. Raises `DataError` when it is damaged."""
        try:
            found: dict[str, Any] = json.loads(self.text)
        except ValueError as error:
            raise DataError(f"{self.path} is damaged at byte {self.start}: {error}") from error
        return found

    def checked(self) -> dict[str, Any]:
        """The JSON. Raises `DataError` when it or the arrays are not what was written."""
        self.load()
        return self.facts

    def load(self) -> bytes:
        """The arrays. Raises `DataError` when they or the JSON are not what was written."""
        with self.path.open("rb") as file:
            file.seek(self.start + HEAD.size + len(self.text))
            arrays = file.read(self.num_array_bytes)
        if zlib.crc32(arrays, zlib.crc32(self.text)) != self.checksum:
            raise DataError(f"{self.path} is damaged between the bytes {self.start} and {self.end}")
        return arrays


def frame(facts: Mapping[str, object], arrays: bytes = b"") -> bytes:
    """One record; numbers of `facts` come back to the bit."""
    text = json.dumps(facts).encode()
    checksum = zlib.crc32(arrays, zlib.crc32(text))
    return HEAD.pack(MAGIC, checksum, len(text), len(arrays)) + text + arrays


def read_frames(path: Path) -> Iterator[Frame]:
    """The records of a file that are whole, in order; their arrays are not read.

    Raises `DataError` where another one must begin and does not.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 0
        while start + HEAD.size <= size:
            magic, checksum, num_text, num_arrays = HEAD.unpack(file.read(HEAD.size))
            end = start + HEAD.size + num_text + num_arrays
            if magic != MAGIC:
                raise DataError(f"{path} is damaged at byte {start}: no record begins there")
            if end > size:
                return
            yield Frame(path, start, checksum, file.read(num_text), num_arrays)
            file.seek(end)
            start = end
