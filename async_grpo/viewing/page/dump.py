"""A run's files about its samples, read line by line: a dump may be larger than memory."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from async_grpo.telemetry.alarms import ALARMS_FILE
from async_grpo.telemetry.sample_dump import dump_files, held_out_file, steps_file, token_files
from async_grpo.util.errors import DataError
from async_grpo.util.run_folder import METRICS_FILE, PARAMETERS_FILE
from async_grpo.viewing.curves import json_object

SAMPLES_FILENAME = "samples.jsonl"
HELD_OUT = "held-out"  # the set without a name
GOLDEN = 2_654_435_761  # 2^32 by the golden ratio, whose multiples spread evenly
OF_SLOT = re.compile(rb'\{"batch": (\d+), "ordinal": (\d+),')
OF_ROW = re.compile(
    rb'\{"batch": (\d+), "ordinal": (\d+), "attempt": (\d+), "index": (\d+), "row": (\d+),'
)
Line = dict[str, Any]  # a JSON object, which another program may have written
Key = tuple[int, int, int]  # ordinal, attempt, index in the group


@dataclass(frozen=True, slots=True)
class Amount:
    """Lines of a dump, and their bytes."""

    num_lines: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Which slots a page shows: all, or a share of them, spread evenly over the run.

    >>> sum(Choice(0.25).has(ordinal) for ordinal in range(1000))
    251
    """

    share: float = 1.0

    def has(self, ordinal: int) -> bool:
        return (ordinal * GOLDEN) % 2**32 < self.share * 2**32


def choose(amount: Amount, *, max_samples: int, max_bytes: float) -> Choice:
    """The largest share of the slots whose lines are within both limits.

    >>> choose(Amount(1000, 10**6), max_samples=500, max_bytes=10**9)
    Choice(share=0.5)
    """
    fits = (max_samples / max(amount.num_lines, 1), max_bytes / max(amount.num_bytes, 1))
    return Choice(min(1.0, *fits))


class Dump:
    """The files of one run, held open: a run that goes on may rename and remove them."""

    def __init__(self, run: Path, *, may_be_empty: bool = False) -> None:
        """`run`: the folder of a run, or its dump. Raises `DataError` if there is no dump."""
        self.folder = run if run.is_dir() else run.parent
        self.name = self.folder.absolute().name
        self.config: Line = {}
        with suppress(OSError):
            self.config = json_object((self.folder / PARAMETERS_FILE).read_bytes())
        name = str(self.config.get("dump_samples_filename") or SAMPLES_FILENAME)
        self.path = self.folder / name if run.is_dir() else run
        self.num_broken = 0  # lines that are no samples, such as one that is being written
        self.problem = ""  # with the first of them
        found = dump_files(self.path)
        if not found and not may_be_empty:
            raise DataError(
                f"no samples in {self.path}: give the folder of a run, or its dump; a run with "
                '--dump-samples-filename "" has none'
            )
        with ExitStack() as stack:
            files = (*found, *dump_files(held_out_file(self.path)))
            self._files = [stack.enter_context(file.open("rb")) for file in files]
            self._num_trained = len(found)  # files, before those of held-out samples
            self.close = stack.pop_all().close

    def amount(self) -> Amount:
        """Lines and bytes of the dump, counted without parsing."""
        num_lines = num_bytes = 0
        for file in self._files:
            file.seek(0)
            for line in file:
                num_lines += 1
                num_bytes += len(line)
        return Amount(num_lines, num_bytes)

    def lines(self, choice: Choice) -> Iterator[Line]:
        """The chosen samples, the oldest first, then the held-out ones; counts broken lines."""
        self.num_broken = 0
        for number, file in enumerate(self._files):
            file.seek(0)
            for raw in file:
                line = sample_of(raw, choice, is_held_out=number >= self._num_trained)
                if line:
                    yield line
                elif line is not None:
                    self.broken(f"{raw[:80]!r}")

    def newest(self, number: int, *, num_bytes: int = 16 * 2**20) -> list[Line]:
        """The last samples but held-out ones, the oldest first, in a file's last `num_bytes`."""
        found: deque[Line] = deque(maxlen=number)
        for file in self._files[: self._num_trained]:
            start = max(0, file.seek(0, os.SEEK_END) - num_bytes)
            file.seek(start)
            if start:
                file.readline()  # a part of one
            lines = (sample_of(raw, Choice(), is_held_out=False) for raw in file)
            found.extend(line for line in lines if line)
        return [*found]

    def broken(self, problem: str) -> None:
        """Count a line that is no sample."""
        self.num_broken += 1
        self.problem = self.problem or problem

    def steps(self) -> Iterator[Line]:
        """Each gradient step: its denominators, and which rank trained what in which round."""
        return _objects(steps_file(self.path))

    def alarms(self) -> Iterator[Line]:
        """Each alarm that was raised or cleared."""
        return _objects(self.folder / ALARMS_FILE)

    def measured(self) -> dict[int, Line]:
        """{step: its row of metrics}."""
        return {row["step"]: row for row in _objects(self.folder / METRICS_FILE) if "step" in row}


def sample_of(raw: bytes, choice: Choice, *, is_held_out: bool) -> Line | None:
    """The sample of a line, empty where it is none; None: it is not chosen.

    The ordinal of a held-out sample is the number of its question: evaluations show the same ones.
    """
    slot = OF_SLOT.match(raw)
    if slot is None or (not is_held_out and not choice.has(int(slot[2]))):
        return None if slot else {}
    line = parsed(raw)
    if not is_held_out or "question" not in line:
        return line
    line |= {"ordinal": line["question"], "set": line.get("set") or HELD_OUT}
    return line if choice.has(line["ordinal"]) else None


class Tail:
    """Files that grow, each line of which is read once; a run may rename and remove them."""

    def __init__(self, find: Callable[[], list[Path]]) -> None:
        """`find()`: the files that are there, the newest last."""
        self._find = find
        self._files: dict[int, BinaryIO] = {}  # by inode, which an open file keeps for itself
        self._ends: dict[int, int] = {}  # of what was read, in bytes
        self._newest: int | None = None

    def is_replaced(self) -> bool:
        """Whether another file stands in the place of one that was read: lines were taken back."""
        there = {path.stat().st_ino for path in self._find()}
        return self._newest is not None and self._newest not in there

    def lines(self) -> Iterator[tuple[BinaryIO, int, bytes]]:
        """File, start and bytes of each whole line that was written since the last call."""
        for path in self._find():
            self._newest = number = path.stat().st_ino
            file = self._files[number] = self._files.get(number) or path.open("rb")
            start = self._ends.get(number, 0)
            file.seek(start)
            for raw in file:
                if raw.endswith(b"\n"):
                    self._ends[number] = start + len(raw)
                    yield file, start, raw
                    start += len(raw)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class TrainedTokens:
    """The trained tokens that ranks have written, looked up by row."""

    def __init__(self, dump: Dump, choice: Choice) -> None:
        """Reads the files once, and remembers where the chosen rows stand."""
        self._tail, self._choice = Tail(partial(token_files, dump.path)), choice
        self._places: dict[tuple[Key, int], tuple[BinaryIO, int]] = {}
        self.read_on()
        self.close = self._tail.close

    def read_on(self) -> None:
        """Read what ranks have written since."""
        for file, start, raw in self._tail.lines():
            if (row := OF_ROW.match(raw)) and self._choice.has(int(row[2])):
                _, ordinal, attempt, index, number = map(int, row.groups())
                # The newest counts: a step may have been trained again after a crash.
                self._places[(ordinal, attempt, index), number] = file, start

    def of(self, key: Key, row: int) -> Line | None:
        """The line of one row; None: no rank has written it."""
        if (key, row) not in self._places:
            return None
        file, start = self._places[key, row]
        file.seek(start)
        return parsed(file.readline()) or None


def parsed(raw: bytes) -> Line:
    """The JSON object of a whole line; empty: it has none, or is still being written."""
    return json_object(raw) if raw.endswith(b"\n") else {}


def _objects(path: Path) -> Iterator[Line]:
    """The JSON objects of a file that may not exist; other lines are left out."""
    if path.is_file():
        with path.open("rb") as file:
            yield from filter(None, map(parsed, file))
