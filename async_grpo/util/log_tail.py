"""The first error and the last lines of a process's log, for messages."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NUM_LINES = 8  # shown
NUM_LINES_SEARCHED = 200
READ_BYTES = 64 << 10  # of the end: a log may be large
# What Ray writes between the lines of a process: ":job_id:01000000", ":actor_name:Worker".
MARKS = (":job_id:", ":actor_name:", ":task_name:")
PROGRESS = "%|"  # of tqdm's bars
PROGRESS_LEVELS = ("INFO ", "DEBUG ")
# Of a process of Ray's that `ray start --block` has found dead.
DEAD = re.compile(r"END (\w+)\.\w+ tail \(exit code\(s\)=(-?\d+)")
# At the start of a line, as Python prints it, or after the mark of vLLM's logger.
ERROR = re.compile(r"^(?:\(\w+ pid=\d+\) ERROR [^]]*\] )?((?:\w+\.)*\w*(?:Error|Exception)\b: .+)")


@dataclass(frozen=True, slots=True)
class LastWords:
    """What one process logged last; all fields are empty where this node has no log of it."""

    path: str = ""
    error: str = ""
    lines: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The end of a message about the loss of the process, in one line."""
        if not self.path:
            return ""
        return (f": {self.error}" if self.error else "") + f" (all of it in {self.path})"


def last_words(logs_folder: str | Path, *, pid: int, num_lines: int = NUM_LINES) -> LastWords:
    """Read the log of process `pid` of this node in Ray's log folder; 0: no process.

    Its errors (`worker-*-PID.err`) go before its output (`worker-*-PID.out`): logging and
    tracebacks are there. A pid can come again; the youngest file counts.
    """
    for ending in ("err", "out"):
        files = Path(logs_folder).glob(f"worker-*-{pid}.{ending}")
        for file in sorted(files, key=os.path.getmtime, reverse=True):
            if lines := tail(file, num_lines=NUM_LINES_SEARCHED):
                said = tuple(line for line in lines if PROGRESS not in line)
                return LastWords(str(file), first_error(said), said[-num_lines:])
    return LastWords()


def first_error(lines: Sequence[str]) -> str:
    """The first line that names an exception: later ones are its consequences.

    >>> first_error(["Traceback (most recent call last):", "ValueError: no room", "OSError: gone"])
    'ValueError: no room'
    >>> first_error(["all is well"])
    ''
    """
    return next((found[1] for line in lines if (found := ERROR.match(line))), "")


def last_error(lines: Sequence[str]) -> str:
    """The cause of a failure in its log: an error line, the end of a raylet, or the last exception.

    >>> last_error(["INFO ready", "ValueError: no room", "error: it is full", "stopped"])
    'it is full'
    >>> last_error(["ValueError: handled", "OSError: gone", "INFO ready"])
    'OSError: gone'
    >>> last_error(["ERR -- ----- END raylet.out tail (exit code(s)=-9 (signal 9)) -----"])
    'its raylet has ended (exit code -9)'
    """
    if own := [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]:
        return own[0]
    if dead := [found for line in lines if (found := DEAD.search(line))]:
        return f"its {dead[0][1]} has ended (exit code {dead[0][2]})"
    return next((found[1] for line in reversed(lines) if (found := ERROR.match(line))), "")


def last_said(lines: Sequence[str]) -> str:
    """The last line that is not a progress message.

    >>> last_said(["the cluster has ended", "INFO worker ready"]), last_said([])
    ('the cluster has ended', '')
    """
    return next((line for line in reversed(lines) if not line.startswith(PROGRESS_LEVELS)), "")


def tail(file: Path, *, num_lines: int) -> tuple[str, ...]:
    """The last lines of a file without empty lines and Ray's marks; none where there is no file.

    >>> tail(Path("/does/not/exist"), num_lines=9)
    ()
    """
    try:
        with file.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - READ_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return ()
    lines = text.splitlines()[size > READ_BYTES :]  # the first is probably the end of one only
    said = [line.rstrip() for line in lines if line.strip() and not line.startswith(MARKS)]
    return tuple(said[-num_lines:])
