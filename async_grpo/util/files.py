"""Atomic writes: whole files replaced at once, whole lines appended."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from async_grpo.util.errors import ConfigError


@contextmanager
def replacing(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Write a file that replaces `path` on exit: readers see the old one or the new.

    An error leaves the old file, and no temporary one. `mode`: permissions before the umask.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an `OSError` of the block into a `ConfigError` about --output-dir."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot write {path} ({reason}): choose another --output-dir") from error


def sync(path: Path) -> None:
    """Return once a file's bytes, or a folder's names, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder, and say so.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


class LineFile:
    """Appends whole lines to a file that a run can do without.

    Where the disk refuses, it says so once and counts the lost lines; the run goes on.
    """

    def __init__(self, path: Path, *, unit: str, say: Callable[[str], object]) -> None:
        """`unit`: what a line holds, in the plural; `say`: logs a sentence for users."""
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


def tokens_folder() -> str | None:
    """The folder of the tokens of this user's private clusters, which is hidden from rewards.

    None where another user owns a folder of that name.
    """
    folder = Path(tempfile.gettempdir(), f"ray-tokens-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return str(folder) if is_own and not found.st_mode & 0o077 else None
