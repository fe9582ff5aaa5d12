"""From a data source to checked records: reading, locating and reporting every line.

A source is a JSONL (or JSON) file, or anything that `datasets.load_dataset` reads. All lines are
checked before a run starts; the first few malformed ones are reported together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from async_grpo.errors import DataError

MAX_REPORTED_ERRORS = 5
JSON_SUFFIXES = (".jsonl", ".json")
DATASETS_FORMATS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow", ".txt": "text"}
SAVED_NAMES = ("state.json", "dataset_dict.json")  # in a folder of save_to_disk
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")

Record = TypeVar("Record")


class MalformedLine(ValueError):
    """A line that cannot become a record; the message lacks its place."""

    def __init__(self, column: str, *, expected: str, got: str) -> None:
        subject = f"column {column!r}: " if column else ""
        super().__init__(f"{subject}expected {expected}, got {got}")


@dataclass(frozen=True, slots=True)
class RawLine:
    """One line of a source before it is checked."""

    place: str  # for messages: "data.jsonl line 17"
    value: Any  # bytes of JSON text, or an already decoded row


def load_records(
    path: str, *, split: str, config: str = "", build: Callable[[Mapping[str, Any]], Record]
) -> Iterator[Record]:
    """Every line of the source through `build`, in order, one at a time.

    `split` and `config`: of a source that `datasets` reads; a file has no config. `build` raises
    `MalformedLine`. Raises `DataError` naming the first few malformed lines, or when the source is
    missing, unreadable or empty.
    """
    return _build_all(_read_lines(path, split=split, config=config), path=path, build=build)


def check_source(path: str, *, option: str, build: Callable[[Mapping[str, Any]], Any]) -> None:
    """Raise `DataError` that names `option` for a path where no source can be.

    Of JSON the first line is read as well, and goes through `build`.
    """
    _require_source(path, option=option)
    source = Path(path)
    if source.is_file() and source.suffix in JSON_SUFFIXES:
        list(_build_all(islice(_read_json(source, path=path), 1), path=path, build=build))


def describe(value: object) -> str:
    """A value for a message, on one line and short."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _build_all(
    lines: Iterator[RawLine], *, path: str, build: Callable[[Mapping[str, Any]], Record]
) -> Iterator[Record]:
    places: dict[str, list[str]] = {}  # what is wrong -> where
    num_records = num_errors = 0
    for line in lines:
        try:
            yield build(_as_row(line.value))
            num_records += 1
        except MalformedLine as error:
            places.setdefault(str(error), []).append(line.place)
            num_errors += 1
            if num_errors == MAX_REPORTED_ERRORS:
                break
    if places:
        errors = "\n".join(f"{_first(where)}, {error}" for error, where in places.items())
        stopped = f" (reading stopped at {num_errors})" if num_errors == MAX_REPORTED_ERRORS else ""
        raise DataError(f"{errors}: correct or remove{stopped}")
    if not num_records:
        raise DataError(f"{path} must hold at least one line, got none: give a file with data")


def _first(places: Sequence[str]) -> str:
    """
    >>> _first(["a line 1"]), _first(["a line 1", "a line 4", "a line 7"])
    ('a line 1', 'a line 1 and 2 more like it')
    """
    more = f" and {len(places) - 1} more like it" if len(places) > 1 else ""
    return f"{places[0]}{more}"


def _as_row(value: Any) -> Mapping[str, Any]:
    if isinstance(value, bytes):
        try:
            value = json.loads(value.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            got = f"byte {value[error.start]:#04x}"
            raise MalformedLine("", expected="UTF-8 text", got=got) from None
        except (json.JSONDecodeError, RecursionError) as error:
            got = f"{describe(value.decode('utf-8', 'replace').strip())} ({error})"
            raise MalformedLine("", expected="a JSON object", got=got) from None
    if not isinstance(value, dict):
        raise MalformedLine("", expected="a JSON object", got=describe(value))
    return value


def _require_source(path: str, *, option: str) -> None:
    source = Path(path)
    if not source.exists() and not _may_be_hub_name(path):
        raise DataError(f"{option} must be an existing file or folder, got {path!r}: check it")
    if source.is_file() and source.suffix not in {*JSON_SUFFIXES, *DATASETS_FORMATS}:
        formats = ", ".join([*JSON_SUFFIXES, *DATASETS_FORMATS])
        raise DataError(f"{option} must end in one of {formats}, got {path!r}: convert it")


def _read_lines(path: str, *, split: str, config: str) -> Iterator[RawLine]:
    _require_source(path, option="data path")
    source = Path(path)
    saved = any((source / name).is_file() for name in SAVED_NAMES)
    if config and (source.is_file() or saved):
        raise DataError(
            f"--data-config {config} must go with a data set that datasets.load_dataset finds by "
            f"name or builds from a folder, got {path!r}, which has none: leave it out"
        )
    if source.is_file() and source.suffix in JSON_SUFFIXES:
        return _read_json(source, path=path)
    return _read_dataset(source, path=path, split=split, config=config)


def _may_be_hub_name(path: str) -> bool:
    """Whether a hub should be asked for what is not on this machine: asking takes long offline."""
    owner, _, _ = path.rpartition("/")
    known = Path(path).suffix in {*JSON_SUFFIXES, *DATASETS_FORMATS}
    return (
        HUB_NAME.fullmatch(path) is not None and not known and not (owner and Path(owner).is_dir())
    )


def _read_json(source: Path, *, path: str) -> Iterator[RawLine]:
    """The lines with text of a JSONL file, or the items of a JSON array."""
    try:
        with source.open("rb") as file:
            if source.suffix == ".json" and _first_byte(file) == b"[":
                yield from _json_array(file.read(), path=path)
                return
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield RawLine(f"{path} line {number}", text)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}: check its permissions") from None


def _first_byte(file: BinaryIO) -> bytes:
    """The first byte that is not white space; the position stays at the start."""
    first = next((text for line in file if (text := line.strip())), b"")[:1]
    file.seek(0)
    return first


def _json_array(text: bytes, *, path: str) -> Iterator[RawLine]:
    try:
        items = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} must be JSON: {error}: correct it, or use JSONL") from None
    for number, item in enumerate(items, start=1):
        yield RawLine(f"{path} item {number}", item)


def _read_dataset(source: Path, *, path: str, split: str, config: str) -> Iterator[RawLine]:
    # Slow to import, and most data is JSONL.
    import datasets

    try:
        if source.is_file():
            kind = DATASETS_FORMATS[source.suffix]
            table = datasets.load_dataset(kind, data_files={split: path}, split=split)
        elif (source / "state.json").is_file():
            table = datasets.load_from_disk(path)
        elif (source / "dataset_dict.json").is_file():
            table = datasets.load_from_disk(str(source / split))
        else:
            table = datasets.load_dataset(path, config or None, split=split)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        cause = str(error.__cause__ or error).strip().partition("\n")[0]
        raise DataError(
            f"datasets.load_dataset cannot read split {split!r} of {path!r} ({cause}): "
            "check the path, --data-config and --data-split"
        ) from error
    for number, row in enumerate(table, start=1):
        yield RawLine(f"{path} row {number}", row)
