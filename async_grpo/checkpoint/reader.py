"""Reads one checkpoint's folder and verifies its hashes.

manifest.json, beside the shards, describes the checkpoint and has the sha256 of every other file:

{"format": 1, "release": "0.1.0", "saved_at_ns": 1794…, "batches": 12, "world_size": 2,
 "config": {…}, "hashes": {"model": …, "encoding": …, "data": …}, "state": {…},
 "files": {"model-00001.safetensors": "9f86d081…"}}

COMMITTED holds the sha256 of manifest.json. Nothing is unpickled, no link is followed, and no file
is read that the manifest does not name.
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
    """All of a checkpoint but its tensors; `config` and `state` are plain JSON values.

    `CheckpointFolder.commit` fills in `files` and `saved_at_ns`.
    """

    batches: int  # completed
    world_size: int
    config: Mapping[str, object]
    hashes: Mapping[str, str]  # sha256 of what a resume must find unchanged: model, data, …
    state: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)  # {name in the folder: sha256}
    saved_at_ns: int = 0  # since 1970, strictly rising: `batches` may repeat after a resume


def to_json(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`."""
    content = {"format": FORMAT, "release": RELEASE, **asdict(manifest)}
    return json.dumps(content, indent=1).encode()


def from_json(text: bytes) -> Manifest:
    """The manifest that `to_json` wrote; the caller has verified the hash of `text`.

    Raises:
        CheckpointError: the format is another one, or a field is missing.
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
    """Verify every file of a checkpoint, and return its manifest.

    `proven`: names of files that were read back already, and must only exist.

    Raises:
        CheckpointError: it is unfinished, damaged or no checkpoint; the message names the file,
            and both hashes where they differ.
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
    """The manifest of a finished checkpoint; the other files are not read.

    Raises:
        CheckpointError: it is unfinished, damaged or no checkpoint.
        OSError: it cannot be read now, and perhaps can later.
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
    """The names of all files in a checkpoint's folder, sorted.

    Raises:
        CheckpointError: the folder holds something other than files.
    """
    kinds = disk.entries(folder)
    if others := sorted(name for name, kind in kinds.items() if kind != "file"):
        raise CheckpointError(f"{folder / others[0]} must be a file, is a folder or a link")
    return sorted(kinds)


def hash_files(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """{name: sha256} of files in `folder`."""
    return dict(zip(names, disk.sha256([folder / name for name in names]), strict=True))


def _check_complete(folder: Path, manifest: Manifest) -> None:
    """Raise unless folder and manifest name the same files: names with paths are refused so."""
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
