"""What a lost process has left in its log, for a person: its first error, and the end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from async_grpo.log_tail import tail_of_process

NUM_LINES_SEARCHED = 200
NUM_LINES_SHOWN = 8
PROGRESS = "%|"  # of tqdm's bars
# At the start of a line, as Python prints it, or after the mark of vLLM's logger.
ERROR = re.compile(r"^(?:\(\w+ pid=\d+\) ERROR [^]]*\] )?((?:\w+\.)*\w*(?:Error|Exception)\b: .+)")


@dataclass(frozen=True, slots=True)
class LastWords:
    """Of one process; all of it empty when it has left no log on this node."""

    path: str = ""
    error: str = ""
    lines: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """To go behind the reason of a loss, in one line."""
        if not self.path:
            return ""
        return (f": {self.error}" if self.error else "") + f" (all of it in {self.path})"


def last_words(logs_folder: str | Path, *, pid: int) -> LastWords:
    """Of process `pid`, which wrote into Ray's folder of logs."""
    found = tail_of_process(logs_folder, pid=pid, num_lines=NUM_LINES_SEARCHED) if pid else None
    if found is None:
        return LastWords()
    said = tuple(line for line in found.lines if PROGRESS not in line)
    return LastWords(found.path, first_error(said), said[-NUM_LINES_SHOWN:])


def first_error(lines: Sequence[str]) -> str:
    """The first line that names an exception: those after it are its consequences.

    >>> first_error(["Traceback (most recent call last):", "ValueError: no room", "OSError: gone"])
    'ValueError: no room'
    >>> first_error(["all is well"])
    ''
    """
    return next((found[1] for line in lines if (found := ERROR.match(line))), "")
