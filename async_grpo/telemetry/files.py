"""Files that people read while they are written: whole lines only, or the whole file at once."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO, Self

from async_grpo.errors import ConfigError
from async_grpo.files import LineFile, replacing

logger = logging.getLogger(__name__)


def to_json(value: Any, *, indent: int | None = None) -> bytes:
    """`value` as JSON without NaN: numbers that are not finite become null, paths become text.

    >>> to_json({"loss": float("nan"), "text": "naïve"}).decode()
    '{"loss": null, "text": "naïve"}'
    """
    text = json.dumps(_plain(value), ensure_ascii=False, indent=indent)
    # A lone surrogate in a model's text has no UTF-8; written as \udc80 it is JSON and comes back.
    return text.encode("utf-8", errors="backslashreplace")


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):  # numpy's numbers are registered as these
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"cannot write a {type(value).__name__} as JSON: {value!r}")


class JsonlWriter:
    """Appends one JSON object a line, each with one write call, so that readers see whole lines.

    A half line that a killed process left at the end of the file is cut off first. Raises
    `ConfigError` when the file cannot be opened; a disk that refuses later costs lines only.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lines = LineFile(self.path, unit="lines", say=logger.warning)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a+b") as file:
                _cut_half_line(file)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def write(self, row: Mapping[str, Any]) -> None:
        """Append `row`."""
        self._lines.append(to_json(row) + b"\n")

    def close(self) -> None:
        """Tell how many lines were lost, if any were."""
        if self._lines.num_lost:
            logger.warning("%s lacks %d lines", self.path, self._lines.num_lost)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut_half_line(file: BinaryIO) -> None:
    end = file.seek(0, os.SEEK_END)
    position, block_size = end, 1 << 16
    while position > 0:
        start = max(0, position - block_size)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            position = start + newline + 1
            break
        position = start
    if position < end:
        file.truncate(position)


def write_json_atomic(path: str | Path, value: Mapping[str, Any]) -> None:
    """Replace `path` with `value` as indented JSON: readers see the old file or the new one.

    Raises `ConfigError` when the folder cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(to_json(value, indent=2) + b"\n")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    return ConfigError(f"cannot write {path} ({reason}): choose another --output-dir")
