"""Examples and sample data: in the top folder of a clone, and inside an installed package.

A path below `examples/` or `sample-data/` that is not here means the one that came with the
package, so that `async-grpo launch examples/quickstart.toml` works in any folder.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]
PATH = re.compile(r"(?<![\w./-])(?:examples|sample-data)(?:/[\w.-]+)+")
COMMANDS = ("prepare", "environment")  # keys whose values are words of a shell


def shared_folder() -> Path:
    """Where they lie."""
    installed = PACKAGE / "share"
    return installed if installed.is_dir() else PACKAGE.parent


def here_or_shared(path: str) -> str:
    """The path as it is, unless it is only there with the package.

    >>> here_or_shared("runs/mine.toml"), Path(here_or_shared("examples/quickstart.toml")).is_file()
    ('runs/mine.toml', True)
    """
    shared = shared_folder() / path
    is_shared = PATH.fullmatch(path) and not Path(path).exists() and shared.exists()
    return str(shared) if is_shared else path


def with_shared(value: Any, *, key: str = "") -> Any:
    """The content of a run's file, or a part of it, with every such path in its texts.

    >>> with_shared({"train": {"batch_size": 4, "data": ["a=sample-data/none.jsonl"]}})
    {'train': {'batch_size': 4, 'data': ['a=sample-data/none.jsonl']}}
    """
    if isinstance(value, dict):
        return {name: with_shared(each, key=name) for name, each in value.items()}
    if isinstance(value, list):
        return [with_shared(each, key=key) for each in value]
    if not isinstance(value, str):
        return value
    quoted = shlex.quote if key in COMMANDS else str
    return PATH.sub(lambda match: quoted(here_or_shared(match[0])), value)
