"""A disk in memory that refuses one operation, or all from some point on; reads count too."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from async_grpo.checkpoint.disk import Kind
from faults.power_cut import Image, MemoryDisk


class FailingDisk(MemoryDisk):
    """Refuses operation number `at`, counted from 0, and with `lasting` every later one."""

    def __init__(self, image: Image, *, at: int, code: int, lasting: bool) -> None:
        super().__init__(image)
        self._next = 0
        self._at = at
        self._code = code
        self._lasting = lasting
        self.refused = ""  # the first operation that was, if any

    def make_folder(self, path: Path) -> None:
        self._count("make_folder", path)
        super().make_folder(path)

    def write(self, path: Path, content: bytes) -> None:
        try:
            self._count("write", path)
        except OSError:
            if self._code == errno.ENOSPC:
                super().write(path, content[: len(content) // 2])
            raise
        super().write(path, content)

    def sync(self, path: Path) -> None:
        self._count("sync", path)
        super().sync(path)

    def rename(self, old: Path, new: Path) -> None:
        self._count("rename", old)
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._count("remove", path)
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self._count("remove_folder", path)
        super().remove_folder(path)

    def entries(self, folder: Path) -> dict[str, Kind]:
        self._count("entries", folder)
        return super().entries(folder)

    def read(self, path: Path) -> bytes:
        self._count("read", path)
        return super().read(path)

    def _count(self, kind: str, path: Path) -> None:
        number, self._next = self._next, self._next + 1
        if number == self._at or (self._lasting and number > self._at):
            self.refused = self.refused or kind
            raise OSError(self._code, os.strerror(self._code), str(path))
