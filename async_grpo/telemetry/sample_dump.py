"""The dump of samples: the newest lines in the file that the user named, older files numbered.

samples.1.jsonl  samples.2.jsonl  samples.jsonl
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from async_grpo.telemetry.jsonl import to_json
from async_grpo.util.files import LineFile, replacing

NUM_FILES = 4  # files that share the space of a dump
UNLIMITED = float("inf")


class SampleDump:
    """Appends a line for each sample, a group at a time.

    A disk error loses samples of the dump and not the run; `take_notices` reports it.
    """

    def __init__(self, path: Path, *, max_bytes: float = UNLIMITED, unit: str = "samples") -> None:
        """`unit`: what a line holds, in the plural, for notices."""
        self._path = path
        self._max_file_bytes = max_bytes / NUM_FILES
        self._notices: list[str] = []
        self._lines = LineFile(path, unit=unit, say=self._notices.append)

    @property
    def num_lost(self) -> int:
        """Samples that could not be written."""
        return self._lines.num_lost

    def take_notices(self) -> tuple[str, ...]:
        """The notices for users since the last call, in sentences."""
        notices = tuple(self._notices)
        self._notices.clear()
        return notices

    def cut_back(self, first: int) -> None:
        """Remove the lines of slots from ordinal `first` on, which are sampled again."""
        try:
            _drop_from(self._path, first)
        except OSError as error:
            self._notices.append(
                f"{self._path} could not be cut back to what was trained "
                f"({error.strerror or error}): lines of ordinals from {first} on may be there "
                "twice"
            )

    def write(self, lines: Sequence[Mapping[str, object]]) -> None:
        """Append the samples of one group, as `batching.sample_log` describes them."""
        content = b"".join(to_json(line) + b"\n" for line in lines)
        self._make_room(len(content))
        self._lines.append(content, number=len(lines))

    def _make_room(self, num_bytes: int) -> None:
        """Begin another file if the newest has no space for `num_bytes`."""
        path = self._path
        try:
            size_bytes = path.stat().st_size if path.exists() else 0
            if size_bytes and size_bytes + num_bytes > self._max_file_bytes:
                for file in _rotate(path):
                    self._notices.append(f"{file} was removed, so that --dump-max-gib is kept")
        except OSError as error:
            self._max_file_bytes = UNLIMITED  # one notice, and no further attempt
            self._notices.append(
                f"{path} grows beyond --dump-max-gib, for it cannot be renamed: {error}"
            )


def dump_files(path: Path) -> list[Path]:
    """The existing files of the dump at `path`, the oldest first."""
    if not path.parent.is_dir():
        return []
    names = re.compile(re.escape(path.stem) + r"\.(\d+)" + re.escape(path.suffix))
    found = ((names.fullmatch(file.name), file) for file in path.parent.iterdir())
    numbered = {int(match[1]): file for match, file in found if match}
    return [numbered[number] for number in sorted(numbered)] + [path] * path.exists()


def _rotate(path: Path) -> list[Path]:
    """Number the newest file, so that another begins; returns the old files that were removed."""
    *older, _ = dump_files(path)
    last = int(older[-1].stem.rpartition(".")[2]) if older else 0
    path.rename(path.with_name(f"{path.stem}.{last + 1}{path.suffix}"))
    removed = older[: max(len(older) + 2 - NUM_FILES, 0)]
    for file in removed:
        file.unlink()
    return removed


def _drop_from(path: Path, first: int) -> None:
    """Remove the lines of slots from ordinal `first` on, replacing each file atomically."""
    for file in dump_files(path):
        with file.open("rb") as old:
            if not all(_is_earlier(line, first) for line in old):
                old.seek(0)
                with replacing(file) as new:
                    new.writelines(line for line in old if _is_earlier(line, first))


def _is_earlier(line: bytes, first: int) -> bool:
    r"""Whether a line is complete and belongs to a slot before `first`.

    >>> _is_earlier(b'{"batch": 2, "ordinal": 9, "attempt": 0}\n', 10)
    True
    >>> _is_earlier(b'{"batch": 2, "ordinal": 10, "attempt": 0}\n', 10)
    False
    >>> _is_earlier(b'{"batch": 2, "ordinal": 9, "att', 10)
    False
    """
    found = re.match(rb'\{"batch": \d+, "ordinal": (\d+),', line)
    return found is not None and line.endswith(b"\n") and int(found[1]) < first


def steps_file(path: Path) -> Path:
    """The file that says which samples of the dump `path` each gradient step trained."""
    return path.with_name(f"{path.stem}.steps{path.suffix}")


def held_out_file(path: Path) -> Path:
    """The file beside the dump `path` with the samples of evaluations."""
    return path.with_name(f"{path.stem}.held_out{path.suffix}")


def tokens_file(path: Path, rank: int) -> Path:
    """The file of the tokens of the dump that a rank has trained, with --dump-token-columns."""
    return path.with_name(f"{path.stem}.rank_{rank}{path.suffix}")


def token_files(path: Path) -> list[Path]:
    """The existing files of `tokens_file`, rank by rank, the oldest first."""
    names = re.compile(re.escape(path.stem) + r"\.rank_(\d+)" + re.escape(path.suffix))
    found = path.parent.iterdir() if path.parent.is_dir() else ()
    ranks = sorted(int(match[1]) for file in found if (match := names.fullmatch(file.name)))
    return [file for rank in ranks for file in dump_files(tokens_file(path, rank))]


def all_files(path: Path) -> list[Path]:
    """All existing files of the dump `path`."""
    beside = (path, held_out_file(path), steps_file(path))
    return [*(file for each in beside for file in dump_files(each)), *token_files(path)]
