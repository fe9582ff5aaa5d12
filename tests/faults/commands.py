"""Our commands as a user runs them: a session and a log each, to be started again by their line."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

POLL_INTERVAL_S = 0.1


class Command:
    """A command line that may be started several times, one life after the other."""

    def __init__(
        self, name: str, line: Sequence[str], *, folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self._line = list(line)
        self._folder = folder
        self._environment = dict(environment)
        self._child: subprocess.Popen[bytes] | None = None
        self.num_starts = 0

    @property
    def pid(self) -> int:
        """Of the latest life, which leads a session; 0 before the first."""
        return self._child.pid if self._child else 0

    @property
    def log(self) -> Path:
        """Output and errors of the latest life."""
        return self._folder / f"{self.name}.{self.num_starts}.log"

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs, and before the first start."""
        return self._child.poll() if self._child else None

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Begin another life; the one before must have ended."""
        if self.is_running:
            raise RuntimeError(f"{self.name} runs already")
        self.num_starts += 1
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                self._line,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_for(self, text: str, *, timeout_s: float) -> None:
        """Until the log holds `text`. Raises with the log's last line when it will not."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log.read_text(errors="replace"):
            if not self.is_running:
                raise RuntimeError(f"{self.name} ended with {self.code}: {self.last_line()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name}: no {text!r} within {timeout_s:g} s, {self.log}")
            time.sleep(POLL_INTERVAL_S)

    def wait(self, *, timeout_s: float) -> int | None:
        """The exit code, or None when it still runs after the timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._child:
                self._child.wait(timeout_s)
        return self.code

    def send(self, number: signal.Signals) -> None:
        """To the process itself, as a supervisor does; its children are its own business."""
        if self.is_running:
            os.kill(self.pid, number)

    def last_line(self) -> str:
        """What a user sees last on the screen."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""
