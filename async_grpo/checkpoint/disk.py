"""The operations on files that a checkpoint is made of; each raises OSError when the disk refuses.

Callers name them through this module (`disk.sync(path)`), so that tests can record and refuse each.
What may be lost by a power cut follows from their order alone: a write lasts once its file is
synced, a new or changed name once its folder is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from async_grpo.util.files import sync

__all__ = [
    "entries", "make_tree", "read", "remove", "remove_tree", "rename", "sha256", "sync", "write",
]  # fmt: skip

HASHING_THREADS = 4  # hashing runs outside Python's lock
Kind = Literal["file", "folder", "other"]  # other: links, sockets, devices


def make_tree(folder: Path) -> None:
    """A folder and those above it, where they are missing."""
    folder.mkdir(parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """A file."""
    path.unlink()


def remove_tree(folder: Path) -> None:
    """A folder and all that lies in it; links are not followed."""
    shutil.rmtree(folder)


def write(path: Path, content: bytes) -> None:
    """A new file."""
    with open(path, "xb") as file:
        file.write(content)


def rename(old: Path, new: Path) -> None:
    """In one step, within a folder; `new` does not exist, or is a file like `old`."""
    os.rename(old, new)


def entries(folder: Path) -> dict[str, Kind]:
    """What lies in a folder, by name; links are not followed."""
    with os.scandir(folder) as found:
        return {entry.name: _kind(entry) for entry in found}


def read(path: Path) -> bytes:
    """A whole small file."""
    return path.read_bytes()


def sha256(paths: Sequence[Path]) -> list[str]:
    """Of files as their device gives them back; several at a time, none whole in memory."""
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return list(pool.map(_sha256, paths))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        if hasattr(os, "posix_fadvise"):  # drop the system's own copy
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _kind(entry: os.DirEntry[str]) -> Kind:
    if entry.is_dir(follow_symlinks=False):
        return "folder"
    return "file" if entry.is_file(follow_symlinks=False) else "other"
