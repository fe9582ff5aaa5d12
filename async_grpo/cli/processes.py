"""Child processes of a command: each in a session of its own, and ended with it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from async_grpo import deadlines
from async_grpo.errors import DeadlineError, WorkerError
from async_grpo.log_tail import NUM_LINES_SEARCHED, tail

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.2
TAIL_LINES = 5


def free_port() -> int:
    """A port that is free on the loopback interface now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """A child with its log file; it and its descendants end with the `with` block."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        shows_output: bool = False,
        stop_signal: signal.Signals = signal.SIGINT,
        stop_timeout_s: float = deadlines.CHILD_ENDED_S,
    ) -> None:
        """The child's errors go to `log`, and its output too unless `shows_output`."""
        self.name = name
        self._command = list(command)
        self._log = log
        self._shows_output = shows_output
        self._environment = dict(environment)
        self._stop_signal = stop_signal
        self._stop_timeout_s = stop_timeout_s

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=None if self._shows_output else log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Send the stop signal, wait, then kill the whole group."""
        if self._child.poll() is None:
            self._signal(self._stop_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(self._stop_timeout_s)
        self._signal(signal.SIGKILL)
        self._child.wait()

    @property
    def pid(self) -> int:
        """Of the child, which leads a session of its own."""
        return self._child.pid

    @property
    def is_running(self) -> bool:
        """The child has not ended."""
        return self._child.poll() is None

    def wait_for(self, text: str, *, timeout_s: float) -> None:
        """Until the log holds `text`. Raises with the log's end when the child ends before."""
        deadline = time.monotonic() + timeout_s
        while text not in self._log.read_text(errors="replace"):
            if self._child.poll() is not None:
                raise WorkerError(f"{self.name} ended early: {self._end_of_log()}")
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{self.name} was not ready within {timeout_s:g} s, its log is {self._log}"
                )
            time.sleep(POLL_INTERVAL_S)

    def wait(self, *, watched: Sequence[Process] = ()) -> None:
        """Until the child ends well. Raises when it fails, or when one of `watched` ends."""
        if self.exit_code(watched=watched):
            raise WorkerError(self.failure)

    def exit_code(self, *, watched: Sequence[Process] = ()) -> int:
        """How the child has ended, once it has. Raises when one of `watched` ends before."""
        while (code := self._child.poll()) is None:
            for other in watched:
                if other._child.poll() is not None:
                    raise WorkerError(f"{other.name} ended early: {other._end_of_log()}")
            time.sleep(POLL_INTERVAL_S)
        return code if code >= 0 else 128 - code  # as shells have it

    @property
    def failure(self) -> str:
        """One sentence on a child that has failed."""
        return f"{self.name} failed with exit code {self._child.poll()}: {self._end_of_log()}"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)

    def _end_of_log(self) -> str:
        """Its error if it named one, else the end of its log."""
        lines = tail(self._log, num_lines=NUM_LINES_SEARCHED)
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return f"{' | '.join(errors[:1] or lines[-TAIL_LINES:])} (all of it in {self._log})"
