"""The parent of one verifier process: tells the pool how it ended, and leaves nothing behind.

consumes      the end of the pool's pipe: the order to end
produces      one report, of the verifier's end or of its state when it had to be ended
waits for     its child, and the pool
unblocked by  either of them ending, or the child having started too many processes
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from async_grpo.verification import family, frames, namespaces

MAX_PROCESSES = 64  # of one verifier, itself included
LOOKS_EVERY_S = 0.2
HISTORY_S = 60.0
REPORT_TIMEOUT_S = 1.0


def keep(work: int, orders: int, *, is_confined: bool) -> None:
    """Fork the verifier that answers on `work`, and see to its end; returns when all have ended."""
    family.forget_children()
    namespaces.die_with_parent(signal.SIGKILL)
    namespaces.adopt_orphans()
    if is_confined:
        namespaces.unshare(namespaces.NEW_MOUNTS)
        namespaces.mount_proc()
    verifier = os.fork()
    if verifier == 0:
        _become_verifier(work)
    os.close(work)
    namespaces.hide_memory()
    pool = socket.socket(fileno=orders)
    _report(pool, {"confined": is_confined})
    _report(pool, _await_end(pool, verifier, is_init=is_confined))
    family.kill_descendants(is_init=is_confined)


def _become_verifier(work: int) -> NoReturn:
    from async_grpo.verification.verifier import serve

    try:
        serve(work)
    finally:
        os._exit(1)


def _await_end(pool: socket.socket, verifier: int, *, is_init: bool) -> dict[str, Any]:
    heard = family.hear_of_children()
    poll = select.poll()
    poll.register(pool, select.POLLIN)
    poll.register(heard, select.POLLIN)
    history: deque[_Moment] = deque(maxlen=int(HISTORY_S / LOOKS_EVERY_S))
    while True:
        events = dict(poll.poll(LOOKS_EVERY_S * 1000))
        family.drain(heard)
        ended = family.reap().get(verifier)
        if ended is not None:
            return _end_of(ended)
        history.append(_look(verifier))
        if pool.fileno() in events:
            within_s, grace_s = _order(pool)
            ended = _end_within(grace_s, verifier)
            return _end_of(ended) if ended else _state(history, within_s=within_s)
        if len(family.descendants(os.getpid())) > MAX_PROCESSES:
            return {"too_many_processes": MAX_PROCESSES}


def _end_within(grace_s: float, verifier: int) -> family.Ended | None:
    """How it ended: a process that ends has closed its pipe a moment before its end is known."""
    deadline = time.monotonic() + grace_s
    while True:
        ended = family.reap().get(verifier)
        if ended is not None or time.monotonic() >= deadline:
            return ended
        time.sleep(family.RETRY_S)


def _end_of(ended: family.Ended) -> dict[str, Any]:
    return {
        "exit_code": ended.exit_code,
        "cpu_s": ended.cpu_s,
        "memory_mib": ended.memory_mib,
    }


@dataclass(frozen=True, slots=True)
class _Moment:
    """What the system had given the verifier by then."""

    time: float
    ran_s: float
    waited_s: float  # for a processor
    is_stopped: bool


def _look(verifier: int) -> _Moment:
    folder = Path(f"/proc/{verifier}")
    try:
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        ran_ns, waited_ns = map(int, (folder / "schedstat").read_text().split()[:2])
    except OSError:  # it has just ended, or the system does not tell
        return _Moment(time.monotonic(), 0.0, 0.0, False)
    return _Moment(time.monotonic(), ran_ns / 1e9, waited_ns / 1e9, state in "Tt")


def _state(history: Sequence[_Moment], *, within_s: float) -> dict[str, Any]:
    """What the verifier got of the processors in the last seconds, and whether it is stopped."""
    now = history[-1]
    then = next((m for m in history if m.time >= now.time - within_s), now)
    return {
        "is_stopped": now.is_stopped,
        "ran_s": now.ran_s - then.ran_s,
        "waited_s": now.waited_s - then.waited_s,
    }


def _order(pool: socket.socket) -> tuple[float, float]:
    """How many seconds back the pool wants to know of, and for how long the verifier may still end.

    Zeros when the pool is gone or does not ask.
    """
    try:
        deadline = time.monotonic() + REPORT_TIMEOUT_S
        order = frames.receive(pool, max_bytes=frames.MAX_ANSWER_BYTES, deadline=deadline)
    except (EOFError, OSError, frames.FrameError):
        return 0.0, 0.0
    return float(order["within_s"]), float(order["grace_s"])


def _report(pool: socket.socket, message: dict[str, Any]) -> None:
    data = frames.encode(message, max_bytes=frames.MAX_ANSWER_BYTES)
    try:
        frames.send(pool, data, deadline=time.monotonic() + REPORT_TIMEOUT_S)
    except OSError:  # the pool wants no report any more; TimeoutError is one of these
        return
