"""What lies in one checkpoint's folder, believed only as far as its hashes say so.

manifest.json is what a checkpoint says of itself: JSON beside the shards, which names and hashes
every one.

{"format": 1, "release": "0.1.0", "saved_at_ns": 1794…, "batches": 12, "world_size": 2,
 "config": {…}, "hashes": {"model": …, "encoding": …, "data": …}, "state": {…},
 "files": {"model-00001.safetensors": "9f86d081…"}}

COMMITTED holds the sha256 of manifest.json, which holds those of all other files. Nothing is
unpickled, no link is followed, and no file is read that the manifest does not name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from async_grpo.checkpoint import disk
from async_grpo.util import RELEASE
from async_grpo.util.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
MARKER_NAME = "COMMITTED"
FORMAT = 1
REMEDY = "resume from another one (--resume PATH), or start anew (--resume never)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything of a checkpoint that is not a tensor; `config` and `state` are plain JSON values.

    `CheckpointFolder.commit` completes the last two.
    """

    batches: int  # completed ones
    world_size: int
    config: Mapping[str, object]
    hashes: Mapping[str, str]  # of what must be the same on resume, by what it is: model, data, …
    state: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)  # sha256 by name within the checkpoint
    saved_at_ns: int = 0  # since 1970, rising: after a resume from further back, batches repeat


def to_json(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`."""
    content = {"format": FORMAT, "release": RELEASE, **asdict(manifest)}
    return json.dumps(content, indent=1).encode()


def from_json(text: bytes) -> Manifest:
    """The manifest that `to_json` wrote; that it did, its hash in the marker says.

    Raises:
        CheckpointError: it is of another format, or lacks something.
    """
    try:
        content = json.loads(text)
        written, release = content["format"], content["release"]
        if written == FORMAT:
            if "objective" in content["config"]:  # the option's name until release 0.1
                content["config"]["algorithm"] = content["config"].pop("objective")
            return Manifest(**{entry.name: content[entry.name] for entry in fields(Manifest)})
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST_NAME} must be one of a checkpoint: {error!r}") from error
    raise CheckpointError(
        f"{MANIFEST_NAME} must have format {FORMAT}, which async-grpo {RELEASE} reads, got "
        f"{written!r}: resume with async-grpo {release!r}, which wrote it"
    )


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
