"""The program inside a confinement: imports graders once, and forks a child for every request.

    pool ──request──▶ server ──fork──▶ child: one adapter, texts of one group, one by one
         ◀──report───        ◀─answers─     (a pipe of its own)

The server imports adapters and evaluates no text. A child has its own pid and user namespace: it
sees no process but itself, and the kernel ends whatever it has started together with it. Without
namespaces the server adopts what a child leaves behind, and kills it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from select import POLLIN, poll
from typing import Any, NoReturn

from async_grpo.verification import frames, namespaces
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.confinement import MAX_OPEN_FILES, MAX_PROCESSES, Isolation

LOOKS_EVERY_S = 0.2
ANSWER_PIPE = 3
CPU_CLOCK = 2  # CPUCLOCK_SCHED of Linux: with a process' id, a clock of its processor time

Grade = Callable[[dict[str, Any]], Iterable[bytes]]


@dataclass(slots=True)
class _Child:
    """A process that grades the samples of one request."""

    request: str  # its id
    pipe: int  # our end
    clock: int  # of its processor time
    ends_at: float  # at the latest, on the monotonic clock
    killed_for: str = ""
    answers: bytes = b""
    sample_since: float = field(default_factory=time.monotonic)
    cpu_s: float = 0.0  # used by then

    def read(self) -> bool:
        """Take what it has written, if anything; the limits of a sample begin with it."""
        try:
            said = os.read(self.pipe, frames.MAX_ANSWERS_BYTES)
        except BlockingIOError:  # without namespaces another process may still hold the other end
            return False
        self.answers += said
        if b"\n" in said:
            self.sample_since, self.cpu_s = time.monotonic(), self.cpu_now()
        return bool(said)

    def reached(self, config: VerifierConfig) -> str:
        """The limit that it has reached, if any."""
        now = time.monotonic()
        if now >= min(self.ends_at, self.sample_since + config.wall_s):
            return "time"
        if self.cpu_now() - self.cpu_s >= config.timeout_s:
            return "processor"
        if len(self.answers) > frames.MAX_ANSWERS_BYTES:
            return "answers"
        return ""

    def cpu_now(self) -> float:
        """Processor time that it has used itself."""
        try:
            return time.clock_gettime(self.clock)
        except OSError:  # it has ended
            return self.cpu_s


class ForkServer:
    """Serves one pool, until that has closed the connection."""

    def __init__(self, pool: socket.socket, isolation: Isolation, config: VerifierConfig) -> None:
        self._pool = pool
        self._isolation = isolation
        self._config = config
        self._pipes: dict[int, _Child] = {}
        self._children: dict[int, _Child] = {}  # by process id
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY) if isolation.confined else -1
        self._next_look = 0.0
        self._poll = poll()
        self._poll.register(pool, POLLIN)
        self._woken = _wake_on_child()
        self._poll.register(self._woken, POLLIN)

    def serve(self, requests: Grade) -> None:
        """Fork a child for each request; `requests` is what a child does with one."""
        while True:
            ready = dict(self._poll.poll(LOOKS_EVERY_S * 1000 if self._children else None))
            for pipe in ready.keys() & self._pipes.keys():
                if not self._pipes[pipe].read():
                    self._forget(pipe)
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            self._kill_overdue()
            if self._pool.fileno() in ready:
                try:
                    request = frames.receive(self._pool, max_bytes=frames.MAX_TASK_BYTES)
                except (EOFError, ConnectionError):
                    return self._end()
                self._start(request, requests)

    def _start(self, request: dict[str, Any], requests: Grade) -> None:
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        try:
            process = self._fork_apart()
        except OSError as error:
            os.close(ours)
            self._report(request["id"], {"failed": str(error)})
        else:
            if process == 0:
                _become(theirs, self._isolation, requests(request))
            ends_at = time.monotonic() + self._config.child_s
            child = _Child(request["id"], ours, ~process << 3 | CPU_CLOCK, ends_at)
            self._children[process] = self._pipes[ours] = child
            self._poll.register(ours, POLLIN)
        finally:
            os.close(theirs)

    def _forget(self, pipe: int) -> None:
        if self._pipes.pop(pipe, None) is not None:
            self._poll.unregister(pipe)

    def _fork_apart(self) -> int:
        """Fork a child that is the first process of a pid namespace."""
        if not self._isolation.confined:
            return os.fork()
        namespaces.unshare(namespaces.NEW_PIDS)
        try:
            process = os.fork()
        except OSError:
            namespaces.rejoin_pids(self._own_pids)
            raise
        if process:
            namespaces.rejoin_pids(self._own_pids)
        return process

    def _reap(self) -> None:
        """Report the children that have ended; of their descendants none is left by then."""
        while True:
            try:
                process, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            if not self._isolation.confined:
                self._kill_strays()
            child = self._children.pop(process, None)
            if child is not None:
                while child.read():
                    pass
                self._forget(child.pipe)
                os.close(child.pipe)
                report = {
                    "exit_code": os.waitstatus_to_exitcode(status),
                    "cpu_s": usage.ru_utime + usage.ru_stime - child.cpu_s,
                    "memory_mib": usage.ru_maxrss / 1024,
                    "killed_for": child.killed_for,
                    "answers": child.answers[: frames.MAX_ANSWERS_BYTES].decode("latin-1"),
                }
                self._report(child.request, report)

    def _report(self, request: str, report: dict[str, Any]) -> None:
        message = frames.encode({"id": request} | report, max_bytes=frames.MAX_REPORT_BYTES)
        self._pool.sendall(message)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOKS_EVERY_S
        for process, child in self._children.items():
            child.killed_for = child.killed_for or child.reached(self._config)
            if len(descendants(process)) >= MAX_PROCESSES:
                child.killed_for = child.killed_for or "processes"
            if child.killed_for:
                _kill(process)
        if not self._isolation.confined:
            self._kill_strays()

    def _kill_strays(self) -> None:
        """End what has left its request's family: the system has made it our child."""
        for process in set(children(os.getpid())) - set(self._children):
            _kill(process)

    def _end(self) -> None:
        """Kill everything below; the end of this process does so in a namespace."""
        self._children.clear()
        while not self._isolation.confined and children(os.getpid()):
            self._kill_strays()
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def children(process: int) -> list[int]:
    """The children of a process, living or not reaped; none when it has ended itself."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


def descendants(process: int) -> list[int]:
    """Children, their children and so on, whatever session or group they have moved to."""
    found: list[int] = []
    waiting = [process]
    while waiting:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found


def _become(answers: int, isolation: Isolation, graded: Iterable[bytes]) -> NoReturn:
    """A child's whole life: it never returns into the server's code."""
    try:
        _shut_in(answers, isolation)
        for answer in graded:
            os.write(ANSWER_PIPE, answer)
        os._exit(0)
    finally:
        os._exit(1)


def _shut_in(answer: int, isolation: Isolation) -> None:
    """Keep no descriptor, signal, session or right of the server."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    if answer != ANSWER_PIPE:
        os.dup2(answer, ANSWER_PIPE, inheritable=False)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.closerange(ANSWER_PIPE + 1, MAX_OPEN_FILES)
    if isolation.confined:  # by the server's rights, which go with the next steps
        namespaces.unshare(namespaces.NEW_MOUNTS)
        namespaces.mount_proc()
        if isolation.scratch_mib:
            namespaces.mount_tmpfs("/dev/shm", size_mib=isolation.scratch_mib)
    if isolation.uid is not None:
        os.setgroups([])
        os.setgid(isolation.uid)
        os.setuid(isolation.uid)
    namespaces.die_with_parent(signal.SIGKILL)  # a change of user would have undone it
    namespaces.hide_memory(is_hidden=False)  # its own /proc files are its own again
    if isolation.confined:
        namespaces.enter_user_namespace(seen_as=isolation.seen_as)
    namespaces.drop_capabilities()


def _wake_on_child() -> int:
    """A descriptor that becomes readable whenever a child ends."""
    heard, rung = os.pipe()
    os.set_blocking(rung, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(rung, warn_on_full_buffer=False)
    return heard


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def _probe(isolation: Isolation) -> NoReturn:
    """Fail unless a child can be confined as a request is; standard error says why."""
    namespaces.unshare(namespaces.NEW_PIDS)
    child = os.fork()
    if child == 0:
        told = os.dup(2)  # standard error is closed meanwhile
        try:
            _shut_in(told, isolation)
            os._exit(0)
        except OSError as error:
            os.write(ANSWER_PIPE, str(error).encode())
        finally:
            os._exit(1)
    os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


def main() -> None:
    """`python -m async_grpo.verification.fork_server DESCRIPTOR`, or `probe ISOLATION`"""
    if sys.argv[1] == "probe":
        _probe(Isolation(**json.loads(sys.argv[2])))
    pool = socket.socket(fileno=int(sys.argv[1]))
    pool.setblocking(True)
    orders = frames.receive(pool, max_bytes=frames.MAX_TASK_BYTES)
    namespaces.forbid_new_privileges()
    namespaces.adopt_orphans()
    namespaces.hide_memory(is_hidden=True)
    # Root's requests cannot import from a home that is closed to others: what sockets load late.
    import encodings.idna  # noqa: F401

    from async_grpo.verification import verifier

    pool.sendall(frames.encode({"preloaded": True}, max_bytes=frames.MAX_REPORT_BYTES))
    config = verifier.read_config(orders["config"])
    grader = verifier.Verifier.load(config)
    gc.collect()
    gc.freeze()  # forks share these objects' memory for longer
    pool.sendall(frames.encode(grader.greeting, max_bytes=frames.MAX_REPORT_BYTES))
    if not grader.load_error:
        ForkServer(pool, Isolation(**orders["isolation"]), config).serve(grader.grade)
    os._exit(0)


if __name__ == "__main__":
    main()
