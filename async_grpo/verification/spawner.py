"""The pool's end of the zygote: starts it, starts it again when it has died, and asks for slots."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from async_grpo.errors import WorkerError
from async_grpo.verification.environment import credential_paths, verifier_environment

PROGRAM = ("-P", "-m", "async_grpo.verification.zygote")
KILL_TIMEOUT_S = 5.0
SEND_TIMEOUT_S = 5.0  # a zygote that has not read its orders for so long is stuck


@dataclass(frozen=True, slots=True)
class Lines:
    """Our ends of a new verifier: one to itself, one to its keeper. They end with the process."""

    number: int
    generation: int  # of the zygote
    work: socket.socket
    keeper: socket.socket
    poll: select.poll  # of both, for one thread at a time

    def close(self) -> None:
        self.work.close()
        self.keeper.close()


class Spawner:
    """Used by all slots of a sandbox, from any thread."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self._watchman: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False
        self._num_spawned = 0
        self._generation = 0

    @property
    def num_restarts(self) -> int:
        """How often a zygote had to take the place of a dead one."""
        return max(0, self._generation - 1)

    def spawn(self) -> Lines:
        """Ask for a verifier process; that it lives is known when its keeper says so."""
        with self._lock:
            self._num_spawned += 1
            work, their_work = socket.socketpair()
            keeper, their_orders = socket.socketpair()
            message = f"spawn {self._num_spawned}"
            try:
                self._send(message, (their_work, their_orders))
            except OSError:  # it died since its last order
                self._end()
                self._send(message, (their_work, their_orders))
            finally:
                their_work.close()
                their_orders.close()
            poll = select.poll()
            poll.register(work, select.POLLIN)
            poll.register(keeper, select.POLLIN)
            return Lines(self._num_spawned, self._generation, work, keeper, poll)

    def kill(self, lines: Lines) -> None:
        """SIGKILL the keeper of a verifier that does not end when it is told to."""
        with self._lock:
            if lines.generation == self._generation:
                try:
                    self._send(f"kill {lines.number}", ())
                except OSError:
                    self._end()

    def give_up(self, lines: Lines) -> None:
        """End the zygote of these with all that is below it; the next spawn starts another.

        Nothing is done when another slot has seen to that before.
        """
        with self._lock:
            if lines.generation == self._generation:
                self._end()

    def close(self) -> None:
        """End the zygote with everything below it, for good."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _send(self, message: str, ends: tuple[socket.socket, ...]) -> None:
        if self._is_closed:
            raise WorkerError("verifier processes must not be started, their pool has been closed")
        if self._watchman is None or self._watchman.poll() is not None:
            self._end()
            self._start()
        assert self._control is not None
        if ends:
            socket.send_fds(self._control, [message.encode()], [end.fileno() for end in ends])
        else:
            self._control.send(message.encode())

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(SEND_TIMEOUT_S)
        hidden = json.dumps(credential_paths(self._environment))
        self._watchman = subprocess.Popen(
            [sys.executable, *PROGRAM, str(theirs.fileno()), hidden],
            env=verifier_environment(self._environment),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )
        theirs.close()
        self._control = ours
        self._generation += 1

    def _end(self) -> None:
        """Closing the control line ends the watchman, who ends all others; then make sure."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._watchman is not None:
            try:
                self._watchman.wait(KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._watchman.kill()
                self._watchman.wait()
            self._watchman = None
