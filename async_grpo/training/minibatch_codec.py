"""One rank's minibatch as bytes and back, exactly, and a file of records that hold them.

The bytes hold all that `model.collate` reads of a minibatch: the arrays of all rows, end to end, as
safetensors; nothing is pickled. They hold no texts, no columns of questions and no versions of
weights, which the dump of samples has.

A file is only appended to. Each record has JSON, arrays and a checksum of both:

    magic "AGR1" | crc32 | bytes of JSON | bytes of arrays | JSON | arrays | magic …

A process that is killed leaves at most one truncated record, at the end.

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
from numpy.typing import DTypeLike, NDArray
from safetensors.numpy import load, save

from async_grpo.types import Episode, Experts, Minibatch, Question, Row, Sample, Verdict
from async_grpo.util.errors import DataError

# Teachers' payloads that are not written: those of a step are many times as large as a checkpoint.
TOO_LARGE = ("teacher.hidden", "teacher.logits")
SCORES, HAS = "scores.", "has."  # prefixes of arrays, before the name of a score

Arrays = dict[str, NDArray[np.generic]]
MAGIC = b"AGR1"
HEAD = struct.Struct("<4sIIQ")


def without_too_large(minibatch: Minibatch) -> tuple[Minibatch, list[str]]:
    """The minibatch without the scores `TOO_LARGE`, and the sorted names of those it had."""
    names = {name for sample in minibatch.samples for name in sample.scores}
    left_out = sorted(names & {*TOO_LARGE} | minibatch.dense.keys())
    samples = (
        replace(sample, scores={n: v for n, v in sample.scores.items() if n not in left_out})
        for sample in minibatch.samples
    )
    small = replace(minibatch, samples=tuple(samples), dense={}) if left_out else minibatch
    return small, left_out


def encode(minibatch: Minibatch) -> bytes:
    """The bytes that `decode` reads: 9 an output token without scores, 4 a prompt token."""
    parts = minibatch.parts()
    return save(_arrays(parts) if parts else {})


def decode(content: bytes, *, round_index: int) -> Minibatch:
    """The minibatch whose bytes `encode` wrote; each sample has one row, as ranks receive them."""
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
    logprobs = [_zeros(row) if row.logprobs is None else row.logprobs for row in rows]
    found: Arrays = {
        "prompt_ids": np.concatenate([row.prompt_token_ids for row in rows]),  # [P] int32
        "prompt_lengths": np.array([len(row.prompt_token_ids) for row in rows]),  # [S]
        "output_ids": np.concatenate([row.token_ids for row in rows]),  # [L] int32
        "output_lengths": np.array([len(row.token_ids) for row in rows]),  # [S]
        "loss_mask": np.concatenate([row.loss_mask for row in rows]),  # [L] bool
        "behaviour_logprobs": np.concatenate(logprobs),  # [L] float32
        "is_given": np.array([row.logprobs is None for row in rows]),  # [S] bool
        "keys": np.array([part.key for part in parts], np.int64),  # [S, 4]
        "num_trained_elsewhere": np.array([part.num_trained_elsewhere for part in parts]),  # [S]
        "rewards": np.array([part.verdict.reward for part in parts], np.float64),  # [S]
    }
    return found | _advantages(parts) | _scores(parts) | _experts(rows)


def _advantages(parts: Sequence[Sample]) -> Arrays:
    """One number a row [S]; if any row has one a token, also those of tokens [L]."""
    by_token = np.array([isinstance(part.advantage, np.ndarray) for part in parts])
    numbers = [0.0 if np.ndim(part.advantage) else part.advantage for part in parts]
    found: Arrays = {"advantages": np.array(numbers, np.float64)}
    if by_token.any():
        found["by_token"] = by_token
        found["token_advantages"] = np.concatenate(
            [p.advantage if np.ndim(p.advantage) else _zeros(p.episode.rows[0]) for p in parts]
        )
    return found


def _experts(rows: Sequence[Row]) -> Arrays:
    """The engine's choices of all rows, end to end, and how many tokens of each have any, [S]."""
    known = [row.experts for row in rows if row.experts is not None]
    if not known:
        return {}
    lengths = [0 if row.experts is None else len(row.experts) for row in rows]
    return {"experts": np.concatenate(known), "experts_lengths": np.array(lengths)}


def _scores(parts: Sequence[Sample]) -> Arrays:
    """By name an array [L] or [L, K], zeros for rows without it, and which rows have it, [S]."""
    found: Arrays = {}
    for name, known in {n: v for part in parts for n, v in part.scores.items()}.items():
        own = [
            part.scores.get(name, _zeros(part.episode.rows[0], known.shape[1:], known.dtype))
            for part in parts
        ]
        found[SCORES + name] = np.concatenate(own)
        found[HAS + name] = np.array([name in part.scores for part in parts])
    return found


def _zeros(
    row: Row, shape: Sequence[int] = (), dtype: DTypeLike = np.float32
) -> NDArray[np.generic]:
    """Zeros of a shape for each output token of a row."""
    return np.zeros((len(row.token_ids), *shape), dtype)


def _sample(
    number: int, prompt: NDArray[np.int32], own: slice, arrays: Mapping[str, Any]
) -> Sample:
    """The sample of row `number`; `own` are its places among all output tokens."""
    ordinal, attempt, index, row = map(int, arrays["keys"][number])
    logprobs = None if arrays["is_given"][number] else arrays["behaviour_logprobs"][own]
    by_token = "by_token" in arrays and arrays["by_token"][number]
    names = [key.removeprefix(SCORES) for key in arrays if key.startswith(SCORES)]
    output, mask = arrays["output_ids"][own], arrays["loss_mask"][own]
    return Sample(
        ordinal,
        index,
        Question(prompt, input="", answer=None, columns={}),
        Episode((Row(prompt, output, logprobs, mask, (), _experts_of(number, arrays)),)),
        Verdict.scored(arrays["rewards"][number]),
        arrays["token_advantages"][own] if by_token else float(arrays["advantages"][number]),
        {name: arrays[SCORES + name][own] for name in names if arrays[HAS + name][number]},
        attempt=attempt,
        row=row,
        num_trained_elsewhere=int(arrays["num_trained_elsewhere"][number]),
    )


def _experts_of(number: int, arrays: Mapping[str, Any]) -> Experts | None:
    ends = np.cumsum(arrays.get("experts_lengths", ()))
    length = arrays["experts_lengths"][number] if len(ends) else 0
    return arrays["experts"][ends[number] - length : ends[number]] if length else None


@dataclass(frozen=True, slots=True)
class Frame:
    """One record of a file: its JSON, and where its arrays lie."""

    path: Path
    start: int  # of the head, in bytes
    checksum: int
    text: bytes  # JSON
    num_array_bytes: int

    @property
    def end(self) -> int:
        """Offset in bytes at which the next record begins."""
        return self.start + HEAD.size + len(self.text) + self.num_array_bytes

    @property
    def facts(self) -> dict[str, Any]:
        """The JSON, unchecked. Raises `DataError` when it cannot be parsed."""
        try:
            found: dict[str, Any] = json.loads(self.text)
        except ValueError as error:
            raise DataError(f"{self.path} is damaged at byte {self.start}: {error}") from error
        return found

    def checked(self) -> dict[str, Any]:
        """The JSON. Raises `DataError` when the checksum of JSON and arrays is another."""
        self.load()
        return self.facts

    def load(self) -> bytes:
        """The arrays. Raises `DataError` when the checksum of JSON and arrays is another."""
        with self.path.open("rb") as file:
            file.seek(self.start + HEAD.size + len(self.text))
            arrays = file.read(self.num_array_bytes)
        if zlib.crc32(arrays, zlib.crc32(self.text)) != self.checksum:
            raise DataError(f"{self.path} is damaged between the bytes {self.start} and {self.end}")
        return arrays


def frame(facts: Mapping[str, object], arrays: bytes = b"") -> bytes:
    """The bytes of one record; `Frame.facts` gives back the same numbers, to the bit."""
    text = json.dumps(facts).encode()
    checksum = zlib.crc32(arrays, zlib.crc32(text))
    return HEAD.pack(MAGIC, checksum, len(text), len(arrays)) + text + arrays


def read_frames(path: Path) -> Iterator[Frame]:
    """Yield the whole records of a file in order, without reading their arrays.

    Raises `DataError` at a place where a record must begin and none does.
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
