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
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from async_grpo.cluster import cluster
from async_grpo.launch.interrupts import NUMBERS
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, DeadlineError, WorkerError
from async_grpo.util.log_tail import NUM_LINES_SEARCHED, last_error, last_said, tail

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.2


class Watched(Protocol):
    """A command, here or elsewhere, that should not end, or not in an error."""

    def check(self) -> None:
        """Raise `AsyncGrpoError` when it has."""


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
class ChildProcess:
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
    max_restarts: int = 0  # after a signal that nobody here has sent; `check` does it

    def __enter__(self) -> Self:
        sees_our_end = self.stdin == subprocess.PIPE  # by itself: it is not asked twice
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
        if self.child.poll() is None:
            self.interrupt()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(self.stop_timeout_s)
        self._signal(signal.SIGKILL)
        self.child.wait()

    def interrupt(self) -> None:
        """Ask the child to end, and do not wait."""
        self._signal(self.stop_signal)

    def wait_for(self, text: str, *, timeout_s: float, watched: Sequence[Watched] = ()) -> None:
        """Until the log holds `text`. Raises with the log's end when the child ends before."""
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
        """How the child has ended, once it has. Raises when one of `watched` ends before."""
        while (code := self.child.poll()) is None:
            for other in watched:
                other.check()
            time.sleep(POLL_INTERVAL_S)
        return code if code >= 0 else 128 - code  # as shells have it

    def check(self) -> None:
        """Start a child again that was killed; raise `WorkerError` when it has ended otherwise."""
        if not self.has_ended:
            return
        if self.child.returncode >= 0 or not self.max_restarts:
            raise WorkerError(self.failure)
        self.max_restarts -= 1
        left = f"{self.max_restarts} times more at most"
        logger.warning("%s; it is started again, %s", self.failure, left)
        self._signal(signal.SIGKILL)  # whom it has left behind
        self.__enter__()

    def ends_within(self, timeout_s: float) -> bool:
        """Whether the child ends so soon."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout_s)
        return self.has_ended

    @property
    def failure(self) -> str:
        """One sentence on a child that has failed."""
        return f"{self.name} {self.last_words}"

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)

    @property
    def has_ended(self) -> bool:
        return self.child.poll() is not None

    @property
    def last_words(self) -> str:
        """How it has ended, and why, as far as its log says so."""
        code = self.child.poll() or 0
        lines = tail(self.log, num_lines=NUM_LINES_SEARCHED)
        cause = last_error(lines) or ("" if code < 0 else last_said(lines))
        how = f"failed with exit code {code}" if code else "ended early"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return f"{how}{f': {cause}' if cause else ''} (all of it in {self.log})"


class CommandHost:
    """The actor on another node, which holds the command as its child."""

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        folder: str,
        log: str,
        variables: Mapping[str, str],
        max_restarts: int,
    ) -> None:
        """`words` behind Python; `folder`: where it works, the same on all machines."""
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        self._process = ChildProcess(
            name,
            [sys.executable, *words],
            log=Path(log),
            environment={**os.environ, **variables},
            stdin=subprocess.PIPE,
            folder=folder,
            max_restarts=max_restarts,
        )
        self._process.__enter__()

    async def last_words(self) -> str:
        """Once the command has ended by itself and is not started again, or was stopped."""
        while True:
            await asyncio.to_thread(self._process.child.wait)
            try:
                self._process.check()
            except WorkerError:
                return self._process.last_words

    async def stop(self) -> None:
        """Ask it to end, and return when it has."""
        await asyncio.to_thread(self._process.__exit__)


@dataclass(eq=False)
class RemoteProcess:
    """`ChildProcess` on another node; the log lies there, where the folder is not shared."""

    name: str
    words: Sequence[str]  # behind Python
    _: KW_ONLY
    node_id: str
    log: Path
    environment: Mapping[str, str]  # that the command gets beside those of `ray start` there
    max_restarts: int = 0

    def __enter__(self) -> Self:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = NodeAffinitySchedulingStrategy(node_id=self.node_id, soft=False)
        actor: Any = ray.remote(CommandHost)
        self._host = actor.options(num_cpus=0, scheduling_strategy=place, max_concurrency=10)
        log = str(self.log.absolute())
        self._host = self._host.remote(
            self.name, [*self.words], os.getcwd(), log, dict(self.environment), self.max_restarts
        )
        self._last_words = self._host.last_words.remote()
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        timeout_s = deadlines.CHILD_ENDED_S + deadlines.ANSWER_S
        with contextlib.suppress(AsyncGrpoError):  # its node may be lost: then it has ended
            cluster.wait(self._host.stop.remote(), timeout_s=timeout_s, who=self.name)
        ray.kill(self._host)

    def check(self) -> None:
        """Raise `WorkerError` when the command has ended, as nobody asked it to."""
        if self.has_ended:
            raise WorkerError(f"{self.name} {self.last_words}")

    @property
    def has_ended(self) -> bool:
        return cluster.is_ready(self._last_words)

    @property
    def last_words(self) -> str:
        """Of a command that has ended; raises `AsyncGrpoError` when its node was lost."""
        return str(cluster.wait(self._last_words, timeout_s=deadlines.ANSWER_S, who=self.name))
