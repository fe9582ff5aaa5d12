"""The files of a dump: the newest lines under the name that the user gave, older ones numbered.

samples.1.jsonl  samples.2.jsonl  samples.jsonl
"""

from __future__ import annotations

import os
import re
from pathlib import Path

NUM_FILES = 4  # among which the room for a dump is divided


def dump_files(path: Path) -> list[Path]:
    """Those of the dump at `path` that exist, the oldest first."""
    if not path.parent.is_dir():
        return []
    names = re.compile(re.escape(path.stem) + r"\.(\d+)" + re.escape(path.suffix))
    found = ((names.fullmatch(file.name), file) for file in path.parent.iterdir())
    numbered = {int(match[1]): file for match, file in found if match}
    return [numbered[number] for number in sorted(numbered)] + [path] * path.exists()


def rotate(path: Path) -> list[Path]:
    """Give the newest file a number, so that another begins; the oldest, which were removed."""
    *older, _ = dump_files(path)
    last = int(older[-1].stem.rpartition(".")[2]) if older else 0
    path.rename(path.with_name(f"{path.stem}.{last + 1}{path.suffix}"))
    removed = older[: max(len(older) + 2 - NUM_FILES, 0)]
    for file in removed:
        file.unlink()
    return removed


def drop_from(path: Path, first: int) -> None:
    """Remove the lines of slot `first` and of later ones from a dump, in one step a file."""
    for file in dump_files(path):
        with file.open("rb") as lines:
            if all(_is_earlier(line, first) for line in lines):
                continue
        _rewrite(file, first)


def _rewrite(file: Path, first: int) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with file.open("rb") as old, temporary.open("wb") as new:
            new.writelines(line for line in old if _is_earlier(line, first))
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _is_earlier(line: bytes, first: int) -> bool:
    r"""Whether a line is whole, and of a slot before `first`.

    >>> _is_earlier(b'{"batch": 2, "ordinal": 9, "attempt": 0}\n', 10)
    True
    >>> _is_earlier(b'{"batch": 2, "ordinal": 10, "attempt": 0}\n', 10)
    False
    >>> _is_earlier(b'{"batch": 2, "ordinal": 9, "att', 10)
    False
    """
    found = re.match(rb'\{"batch": \d+, "ordinal": (\d+),', line)
    return found is not None and line.endswith(b"\n") and int(found[1]) < first
