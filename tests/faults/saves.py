"""Saves whose files tell which one they are of: what crashes are tried on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from replaced_disk import used

from async_grpo.checkpoint.folder import CheckpointFolder, Newest
from async_grpo.checkpoint.reader import Manifest
from async_grpo.util.errors import CheckpointError

KEEP = 2
NAMES = ("model-00001.safetensors", "reference_1_00001.safetensors")


def save(
    disk: Any, number: int, batches: int, *, root: Path, keep: int = KEEP, size: int = 24
) -> Path:
    """A save to `disk`, from its first to its last operation, as the trainer does it."""
    with used(disk):
        return _save(disk, number, batches, folder=CheckpointFolder(root, keep=keep), size=size)


def _save(disk: Any, number: int, batches: int, *, folder: CheckpointFolder, size: int) -> Path:
    temporary = folder.begin(batches)
    try:
        for name, content in shards(number, size=size).items():
            disk.write(temporary / name, content)
        proven = _proven(disk, temporary / NAMES[0])
    except OSError as error:
        folder.abandon(temporary)
        raise CheckpointError(str(error)) from error
    state = {"number": number, "size": size}
    return folder.commit(
        temporary,
        Manifest(
            batches=batches, world_size=2, config={}, hashes={"model": "m"}, state=state,
            files=proven,
        ),
    )  # fmt: skip


def _proven(disk: Any, path: Path) -> Mapping[str, str]:
    """What a rank does with each of its own files, and tells rank 0."""
    disk.sync(path)
    [digest] = disk.sha256([path])
    return {path.name: digest}


def shards(number: int, *, size: int = 24) -> Mapping[str, bytes]:
    """Files that no other save has.

    >>> shards(7, size=12)["model-00001.safetensors"]
    b'model 7, mod'
    """
    return {name: (f"{name[:5]} {number}, " * size).encode()[:size] for name in NAMES}


def newest_on(disk: Any, root: Path) -> Newest:
    """The newest checkpoint that a start on this disk finds."""
    with used(disk):
        return CheckpointFolder(root, keep=KEEP).newest()


def number_of(newest: Newest, *, disk: Any) -> int | None:
    """Which save this is, if its files are what that save wrote; -1 where nothing was found."""
    if newest.path is None or newest.manifest is None:
        return -1
    state = newest.manifest.state
    found = {name: disk.read(newest.path / name) for name in newest.manifest.files}
    return state["number"] if found == shards(state["number"], size=state["size"]) else None
