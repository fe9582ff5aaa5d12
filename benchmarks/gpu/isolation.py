"""One process a variant: its memory, its failure and its slowness stay its own.

Processes are forked from one that has imported everything but never touched the device, so that a
variant starts within a second; what it says arrives as it says it, also when it is ended early.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch

from benchmarks.results import Figure

T = TypeVar("T")
Work = Callable[[], Iterable[Figure]]
GRACE_S = 2.0  # to end by itself after its last word


class NotHereError(Exception):
    """What this machine lacks for a variant."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A variant: figures from a process of its own."""

    name: str
    work: Work
    limit_s: float = 150.0


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a variant said no more."""

    reason: str
    is_failure: bool = False  # of the code; not of the machine or of the time


def ask(question: Callable[[], T]) -> T:
    """The answer of a process of its own, which may touch the device."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(question).result()


def run(trial: Trial, *, limit_s: float) -> Iterator[Figure | Problem]:
    """The figures of a trial as they come, and at the end what went wrong, if anything did."""
    deadline = time.monotonic() + min(limit_s, trial.limit_s)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, trial.work))
    process.start()
    sender.close()
    try:
        yield from _messages(receiver, process, deadline=deadline)
    finally:
        receiver.close()
        _end(process)


def _messages(
    receiver: Connection, process: BaseProcess, *, deadline: float
) -> Iterator[Figure | Problem]:
    """What the process says, then why it stopped if it does not say so itself."""
    begin = time.monotonic()
    try:
        while receiver.poll(max(0.0, deadline - time.monotonic())):
            said = receiver.recv()
            if said is None:
                return
            yield said
    except EOFError:
        process.join(timeout=GRACE_S)
        yield Problem(f"its process ended, exit code {process.exitcode}", is_failure=True)
    else:
        yield Problem(f"not done within {deadline - begin:.0f} s")


def _child(sender: Connection, work: Work) -> None:
    """A process boundary: whatever happens becomes one sentence."""
    os.setsid()  # what it starts, such as compilers, ends with it
    try:
        if torch.cuda._is_in_bad_fork():
            raise RuntimeError("the starting process has used the device: it must not")
        for figure in work():
            sender.send(figure)
    except NotHereError as error:
        sender.send(Problem(f"left out, {error}"))
    except torch.OutOfMemoryError as error:
        sender.send(Problem(f"out of memory: {_first_line(error)}"))
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {_first_line(error)}"
        sender.send(Problem(reason, is_failure=True))
    sender.send(None)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _end(process: BaseProcess) -> None:
    """Nothing of it is left when the next variant starts."""
    assert process.pid
    process.join(timeout=GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
