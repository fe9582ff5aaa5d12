"""Saves whose files tell which one they are of: what crashes are tried on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from async_grpo.checkpoint.disk import Disk
from async_grpo.checkpoint.folder import CheckpointFolder, Newest
from async_grpo.checkpoint.manifest import Manifest
from async_grpo.errors import CheckpointError

KEEP = 2
NAMES = ("model-00001.safetensors", "reference/model-00001.safetensors")


def save(
    disk: Disk, number: int, batches: int, *, root: Path, keep: int = KEEP, size: int = 24
) -> Path:
    """A save from its first to its last operation, as the trainer does it."""
    folder = CheckpointFolder(root, keep=keep, disk=disk)
    temporary = folder.begin(batches)
    try:
        disk.make_folder(temporary / "reference")
        for name, content in shards(number, size=size).items():
            disk.write(temporary / name, content)
    except OSError as error:
        folder.abandon(temporary)
        raise CheckpointError(str(error)) from error
    state = {"number": number, "size": size}
    return folder.commit(
        temporary,
        Manifest(batches=batches, world_size=2, config={}, hashes={"model": "m"}, state=state),
    )


def shards(number: int, *, size: int = 24) -> Mapping[str, bytes]:
    """Files that no other save has.

    >>> shards(7, size=12)["model-00001.safetensors"]
    b'model 7, mod'
    """
    return {name: (f"{name[:5]} {number}, " * size).encode()[:size] for name in NAMES}


def number_of(newest: Newest, *, disk: Disk) -> int | None:
    """Which save this is, if its files are what that save wrote; -1 where nothing was found."""
    if newest.path is None or newest.manifest is None:
        return -1
    state = newest.manifest.state
    found = {name: disk.read(newest.path / name) for name in newest.manifest.files}
    return state["number"] if found == shards(state["number"], size=state["size"]) else None
