"""How processes end on Ctrl-C and SIGTERM, which are handled alike.

A trainer rank that trains stops between two gradient steps, so that it can save a checkpoint; one
that still loads or waits is interrupted at once. A thread enforces the deadline in both cases,
because Python runs no signal handler while the main thread is in a collective or in Ray.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import click

from async_grpo.util import deadlines
from async_grpo.util.errors import RankLostError
from async_grpo.util.run_folder import newest_checkpoint

if TYPE_CHECKING:
    from async_grpo.util.stopping import StopRequest

NUMBERS = (signal.SIGINT, signal.SIGTERM)
SAME_REQUEST_S = 2.0  # one Ctrl-C may come twice: from the terminal and from the launcher
WAKE_AFTER_S = 0.1


class Interrupted(KeyboardInterrupt):
    """This process was asked to end, by signal `number`."""

    def __init__(self, number: int, sentence: str = "interrupted") -> None:
        super().__init__(sentence)
        self.number = number


class RankInterrupts:
    """Handles SIGINT and SIGTERM of one trainer rank, whatever its main thread does.

    The first signal sets `stop` while the run polls it; otherwise it raises `Interrupted` on rank 0
    and exits another rank. After its grace, or at a second deliberate signal, the process exits.
    """

    def __init__(self, stop: StopRequest, *, is_main: bool, say: Callable[[str], None]) -> None:
        self._stop = stop
        self._is_main = is_main
        self._say = say
        self.number = 0  # of the first signal; 0 when there was none

    def listen(self) -> None:
        """Install the handlers; the main thread must call it."""
        # The C handler writes each signal there, whatever the main thread is doing.
        self._signals, writer = socket.socketpair()
        writer.setblocking(False)
        self._writer = writer  # keeps the socket open as long as this object
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in NUMBERS:
            signal.signal(number, self._on_main_thread)
        threading.Thread(target=self._answer, name="interrupts", daemon=True).start()

    @contextmanager
    def on_interrupt(self, output_dir: str | Path) -> Iterator[None]:
        """Around a run: if a signal ended it, raise `Interrupted` with where the run can resume."""
        try:
            yield
        except KeyboardInterrupt:
            pass
        except RankLostError:  # the others have left at once: this one was asked to as well
            if self.number != signal.SIGINT:
                raise
        if not self.number and (not self._stop.is_set() or self._stop.is_in_order):
            return
        number = self.number or signal.SIGTERM  # another rank was asked
        if not self._is_main:
            sys.exit(128 + number)
        raise Interrupted(number, f"interrupted; {where_to_go_on(output_dir)}")

    def _on_main_thread(self, number: int, _frame: FrameType | None) -> None:
        if self._is_main and not self._is_ending() and not self.number:
            self.number = number
            raise Interrupted(number)

    def _answer(self) -> None:
        number, asked_at = self._next_signal(None), time.monotonic()
        if self._is_ending():
            self.number, left_s = number, deadlines.RANK_GRACE_S
            self._stop.set()
            self._say(f"{_name(number)}: ending in order; once more ends at once")
        elif self._is_main:
            left_s = deadlines.RANK_BREAK_OFF_S
            self._wake_main_thread(number)
        else:
            os._exit(128 + number)
        deadline = asked_at + left_s
        while again := self._next_signal(deadline):
            if time.monotonic() - asked_at > SAME_REQUEST_S:
                self._say(f"interrupted: ended at once, by a second {_name(again)}")
                os._exit(128 + number)
        self._say(f"interrupted: ended at once, it did not come to an end within {left_s:g} s")
        os._exit(128 + number)  # no flush: the main thread may hold a stream's lock

    def _wake_main_thread(self, number: int) -> None:
        """Send the signal to the main thread again: it interrupts no sleep if another thread got
        it, or if the main thread began to sleep after it."""
        time.sleep(WAKE_AFTER_S)
        if not self.number and (main := threading.main_thread().ident):
            signal.pthread_kill(main, number)

    def _is_ending(self) -> bool:
        """Whether the main thread polls the request, or has seen it."""
        return self._stop.is_polled or self._stop.is_set()

    def _next_signal(self, deadline: float | None) -> int:
        """The number of the next of our signals; 0 when none comes before the deadline."""
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._signals], [], [], left)[0]:
                return 0
            number = self._signals.recv(1)[0]
            if number in NUMBERS:
                return number


def where_to_go_on(output_dir: str | Path, *, command: str = "the same command") -> str:
    """Tell the user of a run that has ended early how to resume it.

    >>> where_to_go_on("/does/not/exist")
    'no checkpoint was saved yet'
    """
    if not (newest := newest_checkpoint(Path(output_dir))):
        return "no checkpoint was saved yet"
    batches, folder = newest
    return f"{command} goes on after batch {batches}, from {folder}"


def interrupt_once() -> None:
    """Raise `Interrupted` at the first signal, and ignore later ones during the clean-up."""
    for number in NUMBERS:
        signal.signal(number, _interrupt)


def end_with_stdin() -> None:
    """Send SIGTERM to this process when its standard input closes, as its parent has ended."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1 << 12):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin", daemon=True).start()


def stdin_option(function: Callable[..., object]) -> Callable[..., object]:
    """A decorator that gives a click command `--ends-with-stdin`, which its parent passes."""

    def watch(_: click.Context, __: click.Parameter, given: bool) -> None:
        if given:
            end_with_stdin()

    return click.option(
        "--ends-with-stdin", is_flag=True, hidden=True, expose_value=False, callback=watch,
        help="end with whoever holds the standard input",
    )(function)  # fmt: skip


def leave(code: int) -> NoReturn:
    """Exit now with `code`, without waiting for threads or for Ray's shutdown."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    for other in NUMBERS:
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(number)


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
