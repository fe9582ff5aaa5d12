"""Lines that stay in their files, which may be larger than memory: read a window at a time.

A shard is a JSONL or Parquet file. At the start each is read once, for its digest and the places
where its windows begin; after that a window is read when one of its lines is asked for, and a few
are kept. Lines are checked as they are asked for. One that cannot be used is counted and logged,
and the next good line of its window takes its place: what an index stands for depends on the files
alone, so a resumed run reads what it would have read.
"""

from __future__ import annotations

import hashlib
import logging
import os
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

import numpy as np

from async_grpo.config.data_files import DataSource
from async_grpo.data.lines import (
    Build,
    Line,
    MalformedLine,
    build_all,
    read_parquet,
    record_of,
    shard_paths,
)
from async_grpo.util.errors import DataError

logger = logging.getLogger(__name__)
Record = TypeVar("Record")
NUM_CHECKED = 1000  # lines of a source that are checked before a run starts, of each shard one
NUM_KEPT = 4  # windows: a batch may straddle two, and replacements are of earlier ones
MAX_TOLD = 5  # lines that cannot be used, in the log


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One file, cut into windows of `window` lines, of which the last may have fewer."""

    path: str
    window: int
    num_lines: int  # without blank ones
    sha256: str
    seen: tuple[int, int]  # bytes and time of change when it was read
    begins: Sequence[tuple[int, int]] = ()  # of JSONL: (offset, lines before) of each window

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lines of each window."""
        full, rest = divmod(self.num_lines, self.window)
        return (self.window,) * full + ((rest,) if rest else ())

    def read(self, number: int) -> list[Line]:
        """The lines of window `number`; raises `DataError` if the file has changed."""
        first, size = number * self.window, self.sizes[number]
        try:
            if _seen(self.path) != self.seen:
                raise DataError(
                    f"{self.path} must stay as it is while a run reads it, but it has changed "
                    "since the run began: restore it, and resume the run"
                )
            if not self.begins:
                return list(islice(read_parquet(self.path, first=first), size))
            offset, before = self.begins[number]
            with open(self.path, "rb") as file:
                file.seek(offset)
                texts = enumerate(file, start=before + 1)
                lines = ((f"{self.path} line {n}", text) for n, text in texts if text.strip())
                return list(islice(lines, size))
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be read on node {os.uname().nodename}: {error.strerror}: with "
                "--data-order window the trainer's nodes read it while the run goes on"
            ) from None

    def lines(self) -> Iterator[Line]:
        """All lines, a window at a time."""
        return (line for number in range(len(self.sizes)) for line in self.read(number))

    @classmethod
    def of(cls, path: str, *, window: int) -> Shard:
        """Read a file once; raises `DataError` if it cannot be read."""
        try:
            seen = _seen(path)
            if path.endswith(".parquet"):
                from pyarrow.parquet import ParquetFile  # slow, and most data is JSONL

                with open(path, "rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                return cls(path, window, ParquetFile(path).metadata.num_rows, sha256, seen)
            return cls._of_json(path, window, seen)
        except (OSError, ValueError) as error:  # the second: pyarrow's, of a broken file
            why = getattr(error, "strerror", None) or error
            raise DataError(f"{path} cannot be read: {why}: check it") from None

    @classmethod
    def _of_json(cls, path: str, window: int, seen: tuple[int, int]) -> Shard:
        digest, offsets, numbers = hashlib.sha256(), array("q"), array("q")
        num_lines = offset = 0
        with open(path, "rb") as file:
            for number, text in enumerate(file):
                digest.update(text)
                if text.strip():
                    if num_lines % window == 0:
                        offsets.append(offset)
                        numbers.append(number)
                    num_lines += 1
                offset += len(text)
        begins = tuple(zip(offsets, numbers, strict=True))
        return cls(path, window, num_lines, digest.hexdigest(), seen, begins)


def _seen(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


class StreamedRecords(Sequence[Record]):
    """The records of all shards of the sources, by index: source after source, by name of shard."""

    def __init__(
        self, sources: Sequence[tuple[DataSource, Build[Record]]], *, longest_prompt: int = 0
    ) -> None:
        """Read every shard once, and check its first lines; raises `DataError`.

        `longest_prompt`: tokens that a prompt may have; which one is the longest, nobody knows.
        """
        self.longest_prompt = longest_prompt
        self._sources = tuple(sources)
        self._shards = [
            [Shard.of(path, window=source.window) for path in shard_paths(source)]
            for source, _ in sources
        ]
        self._windows = [
            (source, shard, number)
            for source, shards in enumerate(self._shards)
            for shard in shards
            for number in range(len(shard.sizes))
        ]
        sizes = (size for source in range(len(sources)) for size in self.sizes(source))
        self._bounds = np.cumsum((0, *sizes))  # [W + 1] index of each window's first line
        self._refused: dict[int, str] = {}  # by index, what is wrong with the line
        self._num_told = 0
        self._kept: OrderedDict[int, list[Line]] = OrderedDict()  # the lines of the latest windows
        self._check_first()

    def sizes(self, source: int) -> tuple[int, ...]:
        """Lines of each window of one source."""
        return tuple(size for shard in self._shards[source] for size in shard.sizes)

    @property
    def sha256(self) -> str:
        """The digest of all lines, in order: of their files' bytes."""
        digests = (shard.sha256 for shards in self._shards for shard in shards)
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()

    def firsts(self) -> Iterator[Record]:
        """The first record of each source."""
        sizes = np.cumsum([0, *(sum(self.sizes(n)) for n in range(len(self._sources)))])
        return (self[int(first)] for first in sizes[:-1])

    def take_refused(self) -> int:
        """How many lines could not be used, of those asked for since the last call."""
        number, self._num_told = len(self._refused) - self._num_told, len(self._refused)
        return number

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, index: int) -> Record:  # type: ignore[override]  # slices are not used
        if not 0 <= index < len(self):
            raise IndexError(f"{len(self)} lines have none at {index}")
        window = int(np.searchsorted(self._bounds, index, side="right")) - 1
        source, build = self._sources[self._windows[window][0]]
        lines, first = self._lines(window), int(self._bounds[window])
        for number in range(len(lines)):
            own = (index - first + number) % len(lines)
            place, value = lines[own]
            try:
                return record_of(value, build, source.columns)
            except MalformedLine as error:
                self._refuse(first + own, f"{place}, {error}")
        raise DataError(
            f"{self._refused[index]}; nor can any other of the {len(lines)} lines of its window be "
            "used: correct or remove them"
        )

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_kept": OrderedDict(), "_refused": {}, "_num_told": 0}

    def _lines(self, window: int) -> list[Line]:
        if window not in self._kept:
            _, shard, number = self._windows[window]
            self._kept[window] = shard.read(number)
            if len(self._kept) > NUM_KEPT * len(self._sources):
                self._kept.popitem(last=False)
        self._kept.move_to_end(window)
        return self._kept[window]

    def _refuse(self, index: int, reason: str) -> None:
        if index not in self._refused and len(self._refused) < MAX_TOLD:
            logger.warning("a line is left out, and the next of its window taken: %s", reason)
        self._refused[index] = reason

    def _check_first(self) -> None:
        for (source, build), shards in zip(self._sources, self._shards, strict=True):
            most = max(1, NUM_CHECKED // max(1, len(shards)))
            lines = chain.from_iterable(islice(shard.lines(), most) for shard in shards)
            for _ in build_all(lines, path=source.path, build=build, types=source.columns):
                pass
