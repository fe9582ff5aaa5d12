"""Files of whole lines that a run can do without: a disk that refuses costs lines, not the run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


class LineFile:
    """Appends lines, whole or not at all; says once when a disk refuses some, and counts those."""

    def __init__(self, path: Path, *, unit: str, say: Callable[[str], object]) -> None:
        """`unit` is what a line holds, in the plural; `say` takes a sentence for people."""
        self.path = path
        self.num_lost = 0
        self._unit = unit
        self._say = say

    def append(self, lines: bytes, *, number: int = 1) -> None:
        """Write `number` lines at once, so that readers see none of them half."""
        try:
            _append(self.path, lines)
        except OSError as error:
            if not self.num_lost:
                self._say(
                    f"{self.path} cannot be written ({error.strerror or error}): the run goes on, "
                    f"and counts the {self._unit} that are missing from it"
                )
            self.num_lost += number


def _append(path: Path, lines: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        try:
            num_written = 0
            while num_written < len(lines):  # a disk may take a part before it refuses
                num_written += file.write(lines[num_written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), end)
            raise
