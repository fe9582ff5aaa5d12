"""What lies in one checkpoint's folder, believed only as far as its hashes say so.

COMMITTED holds the sha256 of manifest.json, which holds those of all other files. Nothing is
unpickled, no link is followed, and no file is read that the manifest does not name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence
from pathlib import Path

from async_grpo.checkpoint import disk
from async_grpo.checkpoint.manifest import MANIFEST_NAME, MARKER_NAME, Manifest, from_json
from async_grpo.util.errors import CheckpointError

REMEDY = "resume from another one (--resume PATH), or start anew (--resume never)"


def read_checkpoint(folder: Path, *, proven: Container[str] = ()) -> Manifest:
    """The manifest of a checkpoint whose every file is the one that was written.

    `proven`: files that have been read back already, which must only be there.

    Raises:
        CheckpointError: it is unfinished, damaged or no checkpoint: names the file, and both
            hashes where they differ.
    """
    try:
        manifest = read_manifest(folder)
        _check_complete(folder, manifest)
        found = hash_files(folder, sorted(name for name in manifest.files if name not in proven))
    except OSError as error:
        raise CheckpointError(f"{folder} must be readable: {error}; {REMEDY}") from error
    for name, digest in found.items():
        _check_hash(folder / name, expected=manifest.files[name], found=digest)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished checkpoint; the other files are not looked at.

    Raises:
        CheckpointError: it is unfinished, damaged or no checkpoint.
        OSError: it cannot be read, which need not last.
    """
    kinds = disk.entries(folder)
    for name, meaning in ((MANIFEST_NAME, "no checkpoint"), (MARKER_NAME, "not finished")):
        if kinds.get(name) != "file":
            raise CheckpointError(f"{folder} must hold {name}, without it is {meaning}: {REMEDY}")
    text, marker = disk.read(folder / MANIFEST_NAME), disk.read(folder / MARKER_NAME)
    expected = marker.decode(errors="backslashreplace")
    found = hashlib.sha256(text).hexdigest()
    _check_hash(folder / MANIFEST_NAME, expected=expected, found=found)
    try:
        return from_json(text)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def file_names(folder: Path) -> list[str]:
    """What lies in the folder of a checkpoint.

    Raises:
        CheckpointError: there is something else than files.
    """
    kinds = disk.entries(folder)
    if others := sorted(name for name, kind in kinds.items() if kind != "file"):
        raise CheckpointError(f"{folder / others[0]} must be a file, is a folder or a link")
    return sorted(kinds)


def hash_files(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """The sha256 of each file, by name."""
    return dict(zip(names, disk.sha256([folder / name for name in names]), strict=True))


def _check_complete(folder: Path, manifest: Manifest) -> None:
    """Nothing is read that does not lie in the folder itself, whatever the manifest names."""
    found = {*file_names(folder)} - {MANIFEST_NAME, MARKER_NAME}
    if missing := sorted(manifest.files.keys() - found):
        raise CheckpointError(f"{folder} must hold {missing[0]}, which is missing: {REMEDY}")
    if foreign := sorted(found - manifest.files.keys()):
        raise CheckpointError(
            f"{folder} must hold only the files of its {MANIFEST_NAME}, got {foreign[0]}: remove "
            "that file if you know it"
        )


def _check_hash(file: Path, *, expected: str, found: str) -> None:
    if found != expected:
        raise CheckpointError(
            f"{file} must have the sha256 {expected[:80]}, which was written, got {found}: it is "
            f"damaged; {REMEDY}"
        )
