"""Files and folders that are whole or not there, for the scripts of this folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_jsonl(path: Path, *, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace `path` by one JSON object a line."""
    with draft_beside(path) as draft:
        with draft.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        os.replace(draft, path)


def replace_folder(path: Path, *, draft: Path) -> None:
    """Put the folder `draft` in the place of `path`."""
    shutil.rmtree(path, ignore_errors=True)
    os.replace(draft, path)


@contextmanager
def draft_beside(path: Path) -> Iterator[Path]:
    """A path of the same name on the same disk; what is left of it is removed at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        yield Path(folder) / path.name
