"""A file of records that is only appended to: JSON and an array part each, with a checksum.

    magic "AGR1" | crc32 | bytes of JSON | bytes of arrays | JSON | arrays | magic …

A process that is killed leaves at most one record that is cut short, at the end.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.util.errors import DataError

MAGIC = b"AGR1"
HEAD = struct.Struct("<4sIIQ")


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


def frame(facts: Mapping[str, Any], arrays: bytes = b"") -> bytes:
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
