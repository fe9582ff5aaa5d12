"""What a run has written about its samples, read line by line: a dump may be larger than memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from async_grpo.telemetry.sample_dump import dump_files, steps_file, token_files
from async_grpo.util.errors import DataError
from async_grpo.viewing.curves import METRICS_FILENAME

PARAMS_FILENAME = "training_params.json"
SAMPLES_FILENAME = "samples.jsonl"
GOLDEN = 2_654_435_761  # 2^32 by the golden ratio: multiples of it are spread evenly
OF_SLOT = re.compile(rb'\{"batch": (\d+), "ordinal": (\d+),')
OF_ROW = re.compile(
    rb'\{"batch": (\d+), "ordinal": (\d+), "attempt": (\d+), "index": (\d+), "row": (\d+),'
)
Line = dict[str, Any]  # of JSON, whatever wrote it
Key = tuple[int, int, int]  # ordinal, attempt, index in the group


@dataclass(frozen=True, slots=True)
class Amount:
    """Lines of a dump, and their bytes."""

    num_lines: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Which slots a page shows: all, or a share of them that is spread evenly over the run.

    >>> sum(Choice(0.25).has(ordinal) for ordinal in range(1000))
    251
    """

    share: float = 1.0

    def has(self, ordinal: int) -> bool:
        return (ordinal * GOLDEN) % 2**32 < self.share * 2**32


def choose(amount: Amount, *, max_samples: int, max_bytes: float) -> Choice:
    """As many slots as fit both limits.

    >>> choose(Amount(1000, 10**6), max_samples=500, max_bytes=10**9)
    Choice(share=0.5)
    """
    fits = (max_samples / max(amount.num_lines, 1), max_bytes / max(amount.num_bytes, 1))
    return Choice(min(1.0, *fits))


class Dump:
    """The files of one run, held open: a run that goes on may rename and remove them."""

    def __init__(self, run: Path) -> None:
        """`run`: the folder of a run, or its dump. Raises `DataError` if there is no dump."""
        self.folder = run if run.is_dir() else run.parent
        self.config = _read_object(self.folder / PARAMS_FILENAME)
        name = str(self.config.get("dump_samples_filename") or SAMPLES_FILENAME)
        self.path = self.folder / name if run.is_dir() else run
        self.num_broken = 0  # lines that are no samples, such as one that is being written
        self.problem = ""  # with the first of them
        found = dump_files(self.path)
        if not found:
            raise DataError(
                f"no samples in {self.path}: give the folder of a run, or its dump; a run with "
                '--dump-samples-filename "" has none'
            )
        with ExitStack() as stack:
            self._files = [stack.enter_context(file.open("rb")) for file in found]
            self._closing = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.close()

    def amount(self) -> Amount:
        """How much there is; nothing is parsed."""
        num_lines = num_bytes = 0
        for file in self._files:
            file.seek(0)
            for line in file:
                num_lines += 1
                num_bytes += len(line)
        return Amount(num_lines, num_bytes)

    def lines(self, choice: Choice) -> Iterator[Line]:
        """The chosen samples, the oldest first; what is no sample is counted."""
        self.num_broken = 0
        for file in self._files:
            file.seek(0)
            for raw in file:
                slot = OF_SLOT.match(raw)
                if slot is not None and not choice.has(int(slot[2])):
                    continue
                line = parsed(raw) if slot is not None else None
                if line is None:
                    self.broken(f"{raw[:80]!r}")
                else:
                    yield line

    def broken(self, problem: str) -> None:
        """Count a line that is no sample."""
        self.num_broken += 1
        self.problem = self.problem or problem

    def steps(self) -> Iterator[Line]:
        """Each gradient step: its denominators, and which rank trained what in which round."""
        for raw in _raw_lines(steps_file(self.path)):
            line = parsed(raw)
            if line is not None:
                yield line

    def measured(self) -> dict[int, Line]:
        """{step: its row of metrics}."""
        rows = (parsed(raw) for raw in _raw_lines(self.folder / METRICS_FILENAME))
        return {row["step"]: row for row in rows if row is not None and "step" in row}


class TrainedTokens:
    """What the ranks' files say of the tokens that they trained, looked up by row."""

    def __init__(self, dump: Dump, choice: Choice) -> None:
        """Reads the files once, and remembers where the chosen rows stand."""
        self._files: list[BinaryIO] = []
        self._places: dict[tuple[Key, int], tuple[int, int]] = {}
        for path in token_files(dump.path):
            file = path.open("rb")
            self._files.append(file)
            start = 0
            for raw in file:
                if (row := OF_ROW.match(raw)) and choice.has(int(row[2])):
                    _, ordinal, attempt, index, number = map(int, row.groups())
                    # The newest counts: after a crash a step may have been trained again.
                    self._places[(ordinal, attempt, index), number] = len(self._files) - 1, start
                start += len(raw)

    def of(self, key: Key, row: int) -> Line | None:
        """The line of one row."""
        place = self._places.get((key, row))
        if place is None:
            return None
        file = self._files[place[0]]
        file.seek(place[1])
        return parsed(file.readline())

    def close(self) -> None:
        for file in self._files:
            file.close()


def parsed(raw: bytes) -> Line | None:
    """The object of a whole line, or None."""
    try:
        line = json.loads(raw) if raw.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _raw_lines(path: Path) -> Iterator[bytes]:
    if path.is_file():
        with path.open("rb") as file:
            yield from file


def _read_object(path: Path) -> Line:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
