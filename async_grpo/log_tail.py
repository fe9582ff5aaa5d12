"""Finds what a Ray worker process said last: the end of its log, cleaned of Ray's own marks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

NUM_LINES = 20
READ_BYTES = 64 << 10  # of the end: a log may be large
# What Ray writes between the lines of a process: ":job_id:01000000", ":actor_name:Worker".
MARKS = (":job_id:", ":actor_name:", ":task_name:")


@dataclass(frozen=True, slots=True)
class LogTail:
    """The last lines of one log file."""

    path: str
    lines: tuple[str, ...]


def tail_of_process(
    logs_folder: str | Path, *, pid: int, num_lines: int = NUM_LINES
) -> LogTail | None:
    """The end of what process `pid` of this node wrote, None when it left no word here.

    Its errors (`worker-*-PID.err`) go before its output (`worker-*-PID.out`): logging and
    tracebacks are there. A pid can come again; the youngest file counts.
    """
    for ending in ("err", "out"):
        files = Path(logs_folder).glob(f"worker-*-{pid}.{ending}")
        for file in sorted(files, key=_age_s):
            if lines := tail(file, num_lines=num_lines):
                return LogTail(str(file), lines)
    return None


def tail(file: Path, *, num_lines: int = NUM_LINES) -> tuple[str, ...]:
    """The last lines of a file that are not empty and not Ray's marks; none when it is not there.

    >>> tail(Path("/does/not/exist"))
    ()
    """
    try:
        with file.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - READ_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return ()
    lines = text.splitlines()
    if size > READ_BYTES:
        lines = lines[1:]  # probably the end of a line only
    said = [line.rstrip() for line in lines if line.strip() and not line.startswith(MARKS)]
    return tuple(said[-num_lines:])


def _age_s(file: Path) -> float:
    try:
        return -file.stat().st_mtime
    except OSError:
        return 0.0
