"""JSON files that can be read while they are written: by whole lines, or replaced as a whole."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_grpo.util.files import LineFile, explained, replacing

logger = logging.getLogger(__name__)


def to_json(value: object, *, indent: int | None = None) -> bytes:
    """`value` as JSON. Numbers that are not finite become null, paths become text, numpy's arrays
    and scalars become lists and numbers.

    >>> to_json({"loss": float("nan"), "text": "naïve"}).decode()
    '{"loss": null, "text": "naïve"}'
    """
    text = json.dumps(_plain(value), ensure_ascii=False, indent=indent)
    # A lone surrogate in a model's text has no UTF-8; written as \udc80 it is JSON and reads back.
    return text.encode("utf-8", errors="backslashreplace")


def _plain(value: Any) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else os.fspath(value)


class JsonlWriter(LineFile):
    """Appends one JSON object a line to a new or existing file.

    Raises `ConfigError` when the file cannot be opened; a later disk error loses lines only.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, unit="lines", say=logger.warning)
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def write(self, row: Mapping[str, object]) -> None:
        """Append `row`."""
        self.append(to_json(row) + b"\n")

    def close(self) -> None:
        """Log how many lines were lost, if any were."""
        if self.num_lost:
            logger.warning("%s lacks %d lines", self.path, self.num_lost)


def write_json_atomic(path: Path, value: Mapping[str, object], *, mode: int = 0o666) -> None:
    """Replace `path` with `value` as indented JSON: readers see the old file or the new one.

    Raises `ConfigError` when the folder cannot be written.
    """
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, mode=mode) as file:
            file.write(to_json(value, indent=2) + b"\n")


class NewRows:
    """Reads the lines that another process appends to a file. A file that was cut is read anew."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._num_read = 0  # bytes

    def read(self) -> list[dict[str, Any]]:
        """The whole lines since the last call, in order; none while there is no file."""
        try:
            with self._file.open("rb") as file:
                if file.seek(0, 2) < self._num_read:
                    self._num_read = 0
                file.seek(self._num_read)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._num_read += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines() if line]
