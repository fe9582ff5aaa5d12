"""When the lines of growing files appeared: phases of commands from what they say themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

POLL_INTERVAL_S = 0.02


class Timeline:
    """Within, every new line of some files, of now or of later, gets the time at which it came."""

    def __init__(
        self, files: Mapping[str, Path], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._files = dict(files)
        self._clock = clock
        self._read_bytes = dict.fromkeys(files, 0)
        self._lines: list[tuple[float, str, str]] = []  # when, name of the file, the line
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="timeline", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.look()

    def look(self) -> None:
        """Note the whole lines that have come since the last look."""
        for name, file in self._files.items():
            data = file.read_bytes() if file.exists() else b""
            new = data[self._read_bytes[name] : data.rfind(b"\n") + 1]
            self._read_bytes[name] += len(new)
            now = self._clock()
            self._lines += [(now, name, line) for line in new.decode(errors="replace").split("\n")]

    def first(self, name: str, *texts: str) -> tuple[float, str]:
        """When the first line that holds all `texts` came, and the line; raises without."""
        for when, file, line in tuple(self._lines):
            if file == name and all(text in line for text in texts):
                return when, line
        raise LookupError(f"no line of {self._files[name]} holds {' and '.join(texts)!r}")

    def _watch(self) -> None:
        while not self._ended.wait(POLL_INTERVAL_S):
            self.look()


def phases(began: float, marks: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Seconds from each mark to the next: what comes after the last one waited for it.

    A mark that came before the one in front of it has cost nothing by then.

    >>> phases(10.0, [("imports", 13.0), ("other thread", 12.0), ("connect", 13.5)])
    {'imports': 3.0, 'other thread': 0.0, 'connect': 0.5}
    """
    found: dict[str, float] = {}
    for name, when in marks:
        found[name] = max(0.0, when - began)
        began = max(began, when)
    return found
