"""A file of rows that another process writes, read as it grows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class NewRows:
    """The whole lines of a JSONL file that were not read yet; one that was cut is read anew."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._num_read = 0  # bytes

    def read(self) -> list[dict[str, Any]]:
        """In order; none while there is no file."""
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
