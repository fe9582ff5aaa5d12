"""What a checkpoint says of itself: JSON beside the shards, which names and hashes every one.

{"format": 1, "release": "0.1.0", "saved_at_ns": 1794…, "batches": 12, "world_size": 2,
 "config": {…}, "hashes": {"model": …, "encoding": …, "data": …}, "state": {…},
 "files": {"model-00001.safetensors": "9f86d081…"}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from async_grpo import __version__
from async_grpo.util.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
MARKER_NAME = "COMMITTED"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything of a checkpoint that is not a tensor; `config` and `state` are plain JSON values.

    `CheckpointFolder.commit` completes the last two.
    """

    batches: int  # completed ones
    world_size: int
    config: Mapping[str, Any]
    hashes: Mapping[str, str]  # of what must be the same on resume, by what it is: model, data, …
    state: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)  # sha256 by name within the checkpoint
    saved_at_ns: int = 0  # since 1970, rising: after a resume from further back, batches repeat


def to_json(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`."""
    content = {"format": FORMAT, "release": __version__, **asdict(manifest)}
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
        f"{MANIFEST_NAME} must have format {FORMAT}, which async-grpo {__version__} reads, got "
        f"{written!r}: resume with async-grpo {release!r}, which wrote it"
    )
