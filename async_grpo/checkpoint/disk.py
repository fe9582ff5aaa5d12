"""The operations on files that a checkpoint is made of; each raises OSError when the disk refuses.

Callers name them through this module (`disk.sync(path)`), so that tests can record and refuse each.
What may be lost by a power cut follows from their order alone: a write lasts once its file is
synced, a new or changed name once its folder is.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from async_grpo import files

HASHING_THREADS = 4  # hashing runs outside Python's lock
Kind = Literal["file", "folder", "other"]  # other: links, sockets, devices


def make_folder(path: Path) -> None:
    """Its parent must exist, it must not."""
    os.mkdir(path)


def write(path: Path, content: bytes) -> None:
    """A new file."""
    with open(path, "xb") as file:
        file.write(content)


def sync(path: Path) -> None:
    """Return once a file's bytes, or a folder's names, would survive a power cut."""
    files.sync(path)


def rename(old: Path, new: Path) -> None:
    """In one step, within a folder; `new` does not exist, or is a file like `old`."""
    os.rename(old, new)


def remove(path: Path) -> None:
    """A file or a link."""
    os.unlink(path)


def remove_folder(path: Path) -> None:
    """An empty one."""
    os.rmdir(path)


def entries(folder: Path) -> dict[str, Kind]:
    """What lies in a folder, by name; links are not followed."""
    with os.scandir(folder) as found:
        return {entry.name: _kind(entry.stat(follow_symlinks=False)) for entry in found}


def read(path: Path) -> bytes:
    """A whole small file."""
    return path.read_bytes()


def sha256(paths: Sequence[Path]) -> list[str]:
    """Of files as their device gives them back; several at a time, none whole in memory."""
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return list(pool.map(_sha256, paths))


def make_tree(folder: Path) -> None:
    """A folder and those above it that are missing."""
    try:
        make_folder(folder)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_tree(folder.parent)
        make_folder(folder)


def remove_tree(folder: Path) -> None:
    """A folder and all that lies in it."""
    for name, kind in entries(folder).items():
        if kind == "folder":
            remove_tree(folder / name)
        else:
            remove(folder / name)
    remove_folder(folder)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        if hasattr(os, "posix_fadvise"):  # drop the system's own copy
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _kind(status: os.stat_result) -> Kind:
    if stat.S_ISDIR(status.st_mode):
        return "folder"
    return "file" if stat.S_ISREG(status.st_mode) else "other"
