"""Child processes of a command: each in a session of its own, and ended with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Protocol, Self

from async_grpo import deadlines
from async_grpo.errors import DeadlineError, WorkerError
from async_grpo.log_tail import NUM_LINES_SEARCHED, tail

POLL_INTERVAL_S = 0.2
TAIL_LINES = 5


class Watched(Protocol):
    """A command, here or elsewhere, that is not expected to end."""

    def check(self) -> None:
        """Raise `WorkerError` when it has."""


def leash(number: signal.Signals) -> tuple[str, ...]:
    """Words before a command that have the kernel send it `number` when this process is killed.

    The kernel looks at the thread that has started it, which may end before: none but the main one
    leashes. Without util-linux's setpriv nobody does.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None or threading.current_thread() is not threading.main_thread():
        return ()
    return (setpriv, "--pdeathsig", number.name.removeprefix("SIG"))


@dataclass(eq=False)
class Process:
    """A child with its log file; it and its descendants end with the `with` block.

    It is asked to end, too, when this process is killed.
    """

    name: str
    command: Sequence[str]
    _: KW_ONLY
    log: Path  # of its errors, and of its output too unless `shows_output`
    environment: Mapping[str, str]
    folder: str | None = None  # where it works; by default here
    shows_output: bool = False
    stdin: int = subprocess.DEVNULL  # or a pipe, by which the child sees the end of this process
    stop_signal: signal.Signals = signal.SIGINT
    stop_timeout_s: float = deadlines.CHILD_ENDED_S

    def __enter__(self) -> Self:
        sees_our_end = self.stdin == subprocess.PIPE  # by itself: it is not asked twice
        leashed = () if sees_our_end else leash(self.stop_signal)
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(  # it leads a session of its own
                [*leashed, *self.command],
                env=self.environment,
                cwd=self.folder,
                stdin=self.stdin,
                stdout=None if self.shows_output else log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        """Send the stop signal, wait, then kill the whole group."""
        if self.child.poll() is None:
            self.interrupt()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(self.stop_timeout_s)
        self._signal(signal.SIGKILL)
        self.child.wait()

    def interrupt(self) -> None:
        """Ask the child to end, and do not wait."""
        self._signal(self.stop_signal)

    def wait_for(self, text: str, *, timeout_s: float) -> None:
        """Until the log holds `text`. Raises with the log's end when the child ends before."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log.read_text(errors="replace"):
            self.check()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{self.name} was not ready within {timeout_s:g} s, its log is {self.log}"
                )
            time.sleep(POLL_INTERVAL_S)

    def exit_code(self, *, watched: Sequence[Watched] = ()) -> int:
        """How the child has ended, once it has. Raises when one of `watched` ends before."""
        while (code := self.child.poll()) is None:
            for other in watched:
                other.check()
            time.sleep(POLL_INTERVAL_S)
        return code if code >= 0 else 128 - code  # as shells have it

    def check(self) -> None:
        """Raise `WorkerError` when the child has ended, as nobody asked it to."""
        if self.has_ended:
            raise WorkerError(f"{self.name} ended early: {self.last_words}")

    @property
    def failure(self) -> str:
        """One sentence on a child that has failed."""
        return f"{self.name} failed with exit code {self.child.poll()}: {self.last_words}"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)

    @property
    def has_ended(self) -> bool:
        return self.child.poll() is not None

    @property
    def last_words(self) -> str:
        """Its error if it named one, else the end of its log."""
        lines = tail(self.log, num_lines=NUM_LINES_SEARCHED)
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return f"{' | '.join(errors[:1] or lines[-TAIL_LINES:])} (all of it in {self.log})"
