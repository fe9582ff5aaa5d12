"""From a data source to checked records: reading, locating and reporting every line.

A source is a JSONL, JSON or CSV file, a pattern of such files, or anything that
`datasets.load_dataset` reads. All lines are checked before a run starts (except where they stay in
their files, see shards.py); the first few malformed ones are reported together.

Values of a CSV file stay text: "007" is no number, a blank is not null. A source names the columns
of other types.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from glob import glob, has_magic
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from async_grpo.config.data_files import DataSource
from async_grpo.util.errors import DataError

if TYPE_CHECKING:
    from datasets import DatasetBuilder

MAX_REPORTED_ERRORS = 5
NUM_ROWS = 1024  # of a Parquet file that are decoded together
JSON_SUFFIXES = (".jsonl", ".json")
DATASETS_FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".txt": "text"}
WHOLE_CSV = "name each column once, and put quotes around texts with commas or line breaks"
SHARDS = (*JSON_SUFFIXES, ".parquet")  # what can stay in its file
FORMATS = (*JSON_SUFFIXES, ".csv", *DATASETS_FORMATS)
SAVED_NAMES = ("state.json", "dataset_dict.json")  # in a folder of save_to_disk
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")

NO_TYPES: Mapping[str, str] = {}

Record = TypeVar("Record")
Build = Callable[[Mapping[str, object]], Record]
Line = tuple[str, object]  # its place, for messages; bytes of JSON text, or a decoded row


class MalformedLine(ValueError):
    """A line that cannot become a record; the message does not say where the line is."""

    def __init__(self, column: str, *, expected: str, got: str) -> None:
        subject = f"column {column!r}: " if column else ""
        super().__init__(f"{subject}expected {expected}, got {got}")


def load_records(
    source: DataSource,
    build: Build[Record],
    *,
    goes_on: Callable[[], bool] = lambda: True,
    limit: int | None = None,
) -> Iterator[Record]:
    """`build` of every line of the source, in order, one at a time, while `goes_on` returns true.

    `limit`: of the first lines alone; None: of all.

    `build` may raise `MalformedLine`. Raises `DataError` naming the first few malformed lines, or
    when the source is missing, unreadable or empty.
    """
    lines = islice(takewhile(lambda _: goes_on(), _read_lines(source)), limit)
    return build_all(lines, path=source.path, build=build, types=source.columns)


def check_source(path: str, *, option: str, build: Build[object]) -> None:
    """Raise `DataError`, naming `option`, for a path where no source can be.

    The first line of a JSON source is read as well, and given to `build`.
    """
    _require_source(path, option=option)
    path = next(iter(matches(path)), path)
    if _is_json(Path(path)):
        list(build_all(islice(_read_json(path), 1), path=path, build=build))


def describe(value: object) -> str:
    """The value's repr for a message, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def record_of(value: object, build: Build[Record], types: Mapping[str, str]) -> Record:
    """`build` of one line, with the values of the columns in `types` converted to these types.

    Raises `MalformedLine`.
    """
    return build(_converted(_as_row(value), types))


def build_all(
    lines: Iterable[Line], *, path: str, build: Build[Record], types: Mapping[str, str] = NO_TYPES
) -> Iterator[Record]:
    """`record_of` each line; raises `DataError` that names the first few malformed, or for none."""
    places: dict[str, list[str]] = {}  # what is wrong -> where
    num_records = num_errors = 0
    for place, value in lines:
        try:
            yield record_of(value, build, types)
            num_records += 1
        except MalformedLine as error:
            places.setdefault(str(error), []).append(place)
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
            value = json.loads(value.decode("utf-8-sig"), parse_constant=_no_number)
        except UnicodeDecodeError as error:
            got = f"byte {value[error.start]:#04x}"
            raise MalformedLine("", expected="UTF-8 text", got=got) from None
        except (json.JSONDecodeError, RecursionError) as error:
            got = f"{describe(value.decode('utf-8', 'replace').strip())} ({error})"
            raise MalformedLine("", expected="a JSON object", got=got) from None
    if not isinstance(value, dict):
        raise MalformedLine("", expected="a JSON object", got=describe(value))
    return value


def _no_number(constant: str) -> None:
    """Refuse NaN and infinities, which Python's `json` reads though JSON has none."""
    raise MalformedLine("", expected="JSON, which has no such number: null, or text", got=constant)


def _converted(row: Mapping[str, object], types: Mapping[str, str]) -> Mapping[str, object]:
    """The row with the values of the columns in `types` converted to these types.

    >>> _converted({"x": "007", "y": "a", "z": None}, {"x": "int", "z": "float"})
    {'x': 7, 'y': 'a', 'z': None}
    """
    converted = dict(row)
    for name, kind in types.items():
        if name not in row:
            got = f"only columns {', '.join(row)}"
            raise MalformedLine(name, expected=f"what columns {name}={kind} names", got=got)
        try:
            converted[name] = None if row[name] is None else CONVERSIONS[kind](str(row[name]))
        except (ValueError, KeyError):
            expected = f"{kind}, as columns {name}={kind} says"
            raise MalformedLine(name, expected=expected, got=describe(row[name])) from None
    return converted


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


CONVERSIONS: Mapping[str, Callable[[str], object]] = {
    "int": int,
    "float": _finite,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "str": str,
}


def _require_source(path: str, *, option: str) -> None:
    source = Path(path)
    if not source.exists() and not matches(path) and not may_be_hub_name(path):
        raise DataError(f"{option} must be an existing file or folder, got {path!r}: check it")
    if source.is_file() and source.suffix not in FORMATS:
        formats = ", ".join(FORMATS)
        raise DataError(f"{option} must end in one of {formats}, got {path!r}: convert it")


def _read_lines(source: DataSource) -> Iterator[Line]:
    found = shard_paths(source) if source.window else matches(source.path) or [source.path]
    return chain.from_iterable(_lines_of_file(replace(source, path=path)) for path in found)


def matches(path: str) -> list[str]:
    """The files that a pattern with *, ? or [] matches, by name; none for the path of a file."""
    return [] if os.path.exists(path) or not has_magic(path) else sorted(glob(path, recursive=True))


def shard_paths(source: DataSource) -> list[str]:
    """Absolute paths of the JSONL and Parquet files of a source that stays in them, by name.

    A source is a file, a pattern, or a folder, which `datasets` divides into splits. Raises
    `DataError` for what is no such file.
    """
    path = source.path
    _require_source(path, option="data path")
    found = [path] if os.path.isfile(path) else matches(path) or _files_of_split(source)
    if wrong := [each for each in found if not each.endswith(SHARDS) or not os.path.isfile(each)]:
        raise DataError(
            f"--data-order window reads files that end in one of {', '.join(SHARDS)} on this "
            f"machine, got {wrong[0]!r}: convert it, or leave out --data-order"
        )
    return sorted(map(os.path.abspath, found))


def _lines_of_file(source: DataSource) -> Iterator[Line]:
    _require_source(source.path, option="data path")
    place = Path(source.path)
    if source.window and place.suffix == ".parquet":
        return read_parquet(source.path)
    saved = any((place / name).is_file() for name in SAVED_NAMES)
    if source.config and (place.is_file() or saved):
        raise DataError(
            f"--data-config {source.config} must go with a data set that datasets.load_dataset "
            f"finds by name or builds from a folder, got {source.path!r}, which has none: leave it "
            "out"
        )
    if place.is_file() and place.suffix == ".csv":
        return _read_csv(source.path)
    if source.whole_texts and place.is_file() and place.suffix == ".txt":
        return _read_text(place)
    return _read_json(source.path) if _is_json(place) else _read_dataset(source)


def may_be_hub_name(path: str) -> bool:
    """Whether a path that does not exist may be a hub's data set: asking takes long offline."""
    owner, _, _ = path.rpartition("/")
    if HUB_NAME.fullmatch(path) is None or Path(path).suffix in FORMATS:
        return False  # before its folder is looked at, which may be closed to this user
    return not (owner and Path(owner).is_dir())


def _is_json(place: Path) -> bool:
    return place.is_file() and place.suffix in JSON_SUFFIXES


def _read_json(path: str) -> Iterator[Line]:
    """The lines of a JSONL file that are not blank, or the items of a JSON array."""
    try:
        with open(path, "rb") as file:
            if path.endswith(".json") and (text := file.read()).lstrip().startswith(b"["):
                items = json.loads(text)
                for number, item in enumerate(items, start=1):  # as text, which `_as_row` checks
                    yield f"{path} item {number}", json.dumps(item).encode()
                return
            file.seek(0)
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield f"{path} line {number}", text
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}: check its permissions") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} must be JSON: {error}: correct it, or use JSONL") from None


def _read_csv(path: str) -> Iterator[Line]:
    """The rows of a CSV file, each with the number of the line where it ends."""
    csv.field_size_limit(sys.maxsize)  # a text may be as long as in JSON
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or []
            for row in reader:
                place = f"{path} line {reader.line_num}"
                if None in row or None in row.values() or len(row) < len(names):
                    rule = f"one value for each of its columns ({', '.join(names)})"
                    raise DataError(f"{place} must hold {rule}: {WHOLE_CSV}")
                yield place, row
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}: check its permissions") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} must be CSV in UTF-8: {error}: {WHOLE_CSV}") from None


def _read_text(file: Path) -> Iterator[Line]:
    """The whole file as one text."""
    try:
        yield str(file), {"text": file.read_text(encoding="utf-8")}
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}: check its permissions") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file} must be text in UTF-8: {error}: convert it") from None


def read_parquet(path: str, *, first: int = 0) -> Iterator[Line]:
    """The rows of a Parquet file from row `first` on, which counts from 0; few are in memory."""
    from pyarrow.parquet import ParquetFile  # slow, and most data is JSONL

    number = 0  # rows before the next
    with ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if number + size <= first:
                number += size
                continue
            for batch in file.iter_batches(NUM_ROWS, [group]):
                skipped = min(max(first - number, 0), len(batch))
                rows = enumerate(batch.slice(skipped).to_pylist(), start=number + skipped + 1)
                yield from ((f"{path} row {n}", row) for n, row in rows)
                number += len(batch)


def _files_of_split(source: DataSource) -> list[str]:
    """The files of which `datasets` would make the split of a folder, without reading them."""
    import datasets

    path, split = source.path, source.split
    try:
        files = datasets.load_dataset_builder(path, source.config or None).config.data_files
        if files is None:
            raise ValueError("it has no files of its own")
        return list(files[split])
    except (datasets.exceptions.DatasetsError, OSError, ValueError, KeyError) as error:
        raise _unread(source, error) from error


def _unread(source: DataSource, error: Exception) -> DataError:
    cause = str(error.__cause__ or error).strip().partition("\n")[0]
    return DataError(
        f"datasets.load_dataset cannot read split {source.split!r} of {source.path!r} ({cause}): "
        "check the path, --data-config and --data-split"
    )


def _read_dataset(source: DataSource) -> Iterator[Line]:
    import datasets  # slow, and most data is JSONL

    path, split, place = source.path, source.split, Path(source.path)
    try:
        if place.is_file():
            kind = DATASETS_FORMATS[place.suffix]
            table = datasets.load_dataset(kind, data_files={split: path}, split=split)
        elif (place / "state.json").is_file():
            table = datasets.load_from_disk(path)
        elif (place / "dataset_dict.json").is_file():
            table = datasets.load_from_disk(str(place / split))
        else:
            options = _as_text(datasets.load_dataset_builder(path, source.config or None))
            table = datasets.load_dataset(path, source.config or None, split=split, **options)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise _unread(source, error) from error
    for number, row in enumerate(table, start=1):
        yield f"{path} row {number}", row


def _as_text(builder: DatasetBuilder) -> dict[str, object]:
    """Options that make `datasets` read all columns of CSV files as text; {} for other data."""
    import pandas
    from datasets import Features, Value
    from datasets.packaged_modules.csv.csv import CsvConfig

    config = builder.config
    if not isinstance(config, CsvConfig) or builder.info.features:  # the author gave the types
        return {}
    [first, *_] = next(iter(config.data_files.values()))
    names = pandas.read_csv(first, **{**config.pd_read_csv_kwargs, "chunksize": None, "nrows": 0})
    text = Features(dict.fromkeys(names.columns, Value("string")))
    return {"features": text, "keep_default_na": False}
