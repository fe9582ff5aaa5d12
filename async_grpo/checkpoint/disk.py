"""The operations on files that a checkpoint is made of; each raises OSError when the disk fails.

Callers name them through this module (`disk.sync(path)`), so that tests can record and fail each.
Their order alone decides what a power cut may lose: a write survives once its file is synced, a new
or changed name once its folder is synced.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from async_grpo.util.files import sync as sync

HASHING_THREADS = 4  # hashing releases the interpreter's lock
Kind = Literal["file", "folder", "other"]  # other: links, sockets, devices


def make_tree(folder: Path) -> None:
    """Make a folder and its parents where they are missing."""
    folder.mkdir(parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """Remove a file."""
    path.unlink()


def remove_tree(folder: Path) -> None:
    """Remove a folder with its contents; links are not followed."""
    shutil.rmtree(folder)


def write(path: Path, content: bytes) -> None:
    """Write a new file; one that exists raises `FileExistsError`."""
    with open(path, "xb") as file:
        file.write(content)


def rename(old: Path, new: Path) -> None:
    """Rename atomically within a folder; `new` does not exist, or is a file like `old`."""
    os.rename(old, new)


def entries(folder: Path) -> dict[str, Kind]:
    """{name: kind} of what a folder holds; links are not followed."""
    with os.scandir(folder) as found:
        return {entry.name: _kind(entry) for entry in found}


def read(path: Path) -> bytes:
    """The content of a small file."""
    return path.read_bytes()


def sha256(paths: Sequence[Path]) -> list[str]:
    """The sha256 of each file as its device returns it; several at a time, none whole in memory."""
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return list(pool.map(_sha256, paths))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        if hasattr(os, "posix_fadvise"):  # drop the page cache's copy
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _kind(entry: os.DirEntry[str]) -> Kind:
    if entry.is_dir(follow_symlinks=False):
        return "folder"
    return "file" if entry.is_file(follow_symlinks=False) else "other"
