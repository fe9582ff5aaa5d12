"""Child processes of a command, here or on another node of the cluster: they end with it.

A child here leads a session of its own. On another node an actor holds the command as its child:

consumes:     the words of a command
produces:     its log, on that node, and its end
waits for:    the command's end
unblocked by: its exit, or whoever entered the `with` block, also by dying
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Protocol, Self

from async_grpo.launch.interrupts import NUMBERS
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, DeadlineError, WorkerError
from async_grpo.util.log_tail import NUM_LINES_SEARCHED, LastWords, last_error, last_said, tail

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.2


class Watched(Protocol):
    """A command on any node that should keep running, or should not fail."""

    def check(self) -> None:
        """Raise `AsyncGrpoError` when the command has ended or failed."""


def leash(number: signal.Signals) -> tuple[str, ...]:
    """Prefix of a command which has the kernel send it `number` when this process is killed.

    The kernel sends it at the end of the thread that started the command, which may end before the
    process: only the main thread gets the prefix. It is empty without util-linux's setpriv.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None or threading.current_thread() is not threading.main_thread():
        return ()
    return (setpriv, "--pdeathsig", number.name.removeprefix("SIG"))


def ended_within(timeout_s: float, *processes: subprocess.Popen[bytes]) -> bool:
    """Wait at most `timeout_s` for the processes to end; return whether all of them have."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0.0))
    return all(process.poll() is not None for process in processes)


@dataclass(eq=False)
class ChildProcess:
    """A child process with a log file; it and its descendants end with the `with` block.

    The kernel sends it the stop signal when this process is killed.
    """

    name: str
    command: Sequence[str]
    _: KW_ONLY
    log: Path  # takes stderr, and stdout too unless `shows_output`
    environment: Mapping[str, str] = field(repr=False)  # it may hold secrets
    folder: str | None = None  # working directory; None: this process's
    shows_output: bool = False
    stdin: int = subprocess.DEVNULL  # PIPE: it closes when this process ends
    stop_signal: signal.Signals = signal.SIGINT
    stop_timeout_s: float = deadlines.CHILD_ENDED_S
    max_restarts: int = 0  # `check` restarts a child that a foreign signal killed
    may_end: bool = False  # with exit code 0, before whoever entered the block leaves it

    def __enter__(self) -> Self:
        sees_our_end = self.stdin == subprocess.PIPE  # then it stops by itself
        leashed = () if sees_our_end else leash(self.stop_signal)
        is_first = not hasattr(self, "child")
        # Ray blocks signals in the threads of an actor, and a child would inherit that.
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)
        with self.log.open("wb" if is_first else "ab") as log:
            self.child = subprocess.Popen(  # it leads a session of its own
                [*leashed, *self.command],
                env=self.environment,
                cwd=self.folder,
                stdin=self.stdin,
                stdout=None if self.shows_output else log,
                stderr=log,
                start_new_session=True,
            )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(self, *_: object) -> None:
        """Send the stop signal, wait, then kill the whole group."""
        self.max_restarts = 0
        if not self.has_ended:
            self.interrupt()
            self.ends_within(self.stop_timeout_s)
        self._signal(signal.SIGKILL)
        self.child.wait()

    def interrupt(self) -> None:
        """Send the stop signal, and do not wait."""
        self._signal(self.stop_signal)

    def wait_for(self, text: str, *, timeout_s: float, watched: Sequence[Watched] = ()) -> None:
        """Wait until the log holds `text`; raise `WorkerError` with its end if the child ends."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log.read_text(errors="replace"):
            for each in (self, *watched):
                each.check()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{self.name} must be ready within {timeout_s:g} s, it was not: is the machine "
                    f"busy? Its log is {self.log}"
                )
            time.sleep(POLL_INTERVAL_S)

    def exit_code(self, *, watched: Sequence[Watched] = ()) -> int:
        """Wait for the child's exit code; raise when `check` of one of `watched` does before."""
        while (code := self.child.poll()) is None:
            for other in watched:
                other.check()
            time.sleep(POLL_INTERVAL_S)
        return code if code >= 0 else 128 - code  # as shells have it

    def check(self) -> None:
        """Restart a child that was killed; raise `WorkerError` when it has ended otherwise."""
        if not self.has_ended or self.has_done:
            return
        if self.child.returncode >= 0 or not self.max_restarts:
            raise WorkerError(self.failure)
        self.max_restarts -= 1
        left = f"{self.max_restarts} times more at most"
        logger.warning("%s; it is started again, %s", self.failure, left)
        self._signal(signal.SIGKILL)  # its descendants that are still alive
        self.__enter__()

    def ends_within(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`; return whether the child has ended."""
        return ended_within(timeout_s, self.child)

    @property
    def failure(self) -> str:
        """A sentence that says how the child has failed."""
        return f"{self.name} {self.last_words}"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)

    @property
    def has_ended(self) -> bool:
        return self.child.poll() is not None

    @property
    def has_done(self) -> bool:
        """Whether it has ended well, and may."""
        return self.may_end and self.child.poll() == 0

    @property
    def last_words(self) -> str:
        """How the child has ended, and the cause that its log names."""
        code = self.child.poll() or 0
        lines = tail(self.log, num_lines=NUM_LINES_SEARCHED)
        cause = last_error(lines) or ("" if code < 0 else last_said(lines))
        how = f"failed with exit code {code}" if code else "ended early"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return how + LastWords(str(self.log), cause).sentence


class CommandHost:
    """The actor on another node, which holds the command as its child."""

    def __init__(self, process: ChildProcess, files: Mapping[Path, str]) -> None:
        """`process`: see `RemoteProcess`; `files`: {path: text} that are written for it here."""
        process.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file, text in files.items():
            if not file.exists() or file.read_text() != text:  # others read it where it is shared
                file.write_text(text)
        process.command = [sys.executable, *process.command]
        process.environment = {**os.environ, **process.environment}
        self._process = process.__enter__()

    async def last_words(self) -> str:
        """Wait for the final end of the command, after all restarts; say how it failed, if so."""
        while True:
            await asyncio.to_thread(self._process.child.wait)
            if self._process.has_done:
                return ""
            try:
                self._process.check()
            except WorkerError:
                return self._process.last_words

    async def stop(self) -> None:
        """End the command, and return when it has ended."""
        await asyncio.to_thread(self._process.__exit__)


@dataclass(eq=False)
class RemoteProcess:
    """A child on another node; its log lies on that node unless the folder is shared.

    `process.command` has Python's arguments, `process.environment` the variables beside those of
    `ray start` there. The child works in this process's folder, and ends with its host actor.
    """

    process: ChildProcess
    _: KW_ONLY
    node_id: str
    reads: Path  # a file beside the log, which is copied to that node

    def __enter__(self) -> Self:
        from async_grpo.cluster.cluster import Cluster  # imports Ray

        self._cluster = Cluster()
        log, folder = self.process.log.absolute(), os.getcwd()
        process = replace(self.process, log=log, folder=folder, stdin=subprocess.PIPE)
        actor = self._cluster.actor(CommandHost, node_id=self.node_id, max_concurrency=10)
        self._host = actor.remote(process, {self.reads.absolute(): self.reads.read_text()})
        self._last_words = self._host.last_words.remote()
        return self

    def __exit__(self, *_: object) -> None:
        timeout_s = deadlines.CHILD_ENDED_S + deadlines.ANSWER_S
        with contextlib.suppress(AsyncGrpoError):  # its node may be lost: then it has ended
            self._cluster.wait(self._host.stop.remote(), timeout_s=timeout_s, who=self.process.name)
        self._cluster.end(self._host)

    def check(self) -> None:
        """Raise `WorkerError` when the command has ended before it was stopped."""
        if self.has_ended and (words := self.last_words):
            raise WorkerError(f"{self.process.name} {words}")

    @property
    def has_ended(self) -> bool:
        return self._cluster.is_ready(self._last_words)

    @property
    def last_words(self) -> str:
        """How the command has failed; raises `AsyncGrpoError` when its node was lost."""
        call, timeout_s = self._last_words, deadlines.ANSWER_S
        return str(self._cluster.wait(call, timeout_s=timeout_s, who=self.process.name))
