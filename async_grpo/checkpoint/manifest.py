"""What a checkpoint says of itself: JSON beside the shards, which names and hashes every one.

{"format": 1, "release": "0.1.0", "saved_at_ns": 1794…, "batches": 12, "world_size": 2,
 "config": {…}, "hashes": {"model": …, "encoding": …, "data": …}, "state": {…},
 "files": {"model-00001.safetensors": "9f86d081…"}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any

from async_grpo import __version__
from async_grpo.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
MARKER_NAME = "COMMITTED"
FORMAT = 1
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything of a checkpoint that is not a tensor; `config` and `state` are plain JSON values.

    The last two are filled in by `CheckpointFolder.commit`.
    """

    batches: int  # completed ones
    world_size: int
    config: Mapping[str, Any]
    hashes: Mapping[str, str]  # of what must be the same on resume, by what it is: model, data, …
    state: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)  # sha256 by name within the checkpoint
    saved_at_ns: int = 0  # since 1970, rising: after a resume from further back, batches repeat


NAMES = [entry.name for entry in fields(Manifest)]
NUMBERS = ("batches", "world_size", "saved_at_ns")
MAPPINGS = ("config", "hashes", "state", "files")


def to_json(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`."""
    content = {"format": FORMAT, "release": __version__, **asdict(manifest)}
    return json.dumps(content, indent=1).encode()


def from_json(text: bytes) -> Manifest:
    """The manifest that `to_json` wrote.

    Raises:
        CheckpointError: it is another format, lacks something, or names a file elsewhere.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST_NAME} must be JSON, cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{MANIFEST_NAME} must hold an object, got {_short(content)}")
    _check_format(content)
    _check_fields(content)
    if "objective" in content["config"]:  # the option's name until release 0.1
        content["config"]["algorithm"] = content["config"].pop("objective")
    return Manifest(**{name: content[name] for name in NAMES})


def check_names(names: Iterable[str]) -> None:
    """Raise `CheckpointError` unless every name leads to a file within the checkpoint."""
    for name in names:
        path = PurePosixPath(name)
        parts_as_given = name.split("/")
        is_inside = not path.is_absolute() and not {"", ".", ".."} & set(parts_as_given)
        if not is_inside or "\\" in name or "\0" in name or name in (MANIFEST_NAME, MARKER_NAME):
            raise CheckpointError(
                f"{MANIFEST_NAME} must name files within the checkpoint, got {_short(name)}: "
                "do not use this checkpoint, it was not written by async-grpo"
            )


def _check_format(content: Mapping[str, Any]) -> None:
    if type(content.get("format")) is int and content["format"] == FORMAT:
        return
    raise CheckpointError(
        f"{MANIFEST_NAME} must have format {FORMAT}, which async-grpo {__version__} reads, got "
        f"{_short(content.get('format'))}: resume with async-grpo "
        f"{_short(content.get('release'))}, which wrote it"
    )


def _check_fields(content: Mapping[str, Any]) -> None:
    expected = {"format", "release", *NAMES}
    if differing := sorted(expected ^ content.keys()):
        raise CheckpointError(
            f"{MANIFEST_NAME} of format {FORMAT} must hold {', '.join(sorted(expected))}, missing "
            f"or unknown: {', '.join(map(_short, differing))}"
        )
    for name in NUMBERS:
        if type(content[name]) is not int or content[name] < (name == "world_size"):
            raise _wrong(name, "a whole number", content[name])
    for name in MAPPINGS:
        if not isinstance(content[name], dict):
            raise _wrong(name, "an object", content[name])
    for name, value in content["hashes"].items():
        if not isinstance(value, str):
            raise _wrong(f"hashes.{name}", "a string", value)
    check_names(content["files"])
    for name, value in content["files"].items():
        if not isinstance(value, str) or not SHA256.fullmatch(value):
            raise _wrong(f"files.{name}", "a sha256 in hexadecimal", value)


def _wrong(name: str, rule: str, value: object) -> CheckpointError:
    return CheckpointError(f"{name} in {MANIFEST_NAME} must be {rule}, got {_short(value)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
