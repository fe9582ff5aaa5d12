"""The program inside a confinement: imports graders once, and forks a child for every request.

    pool ──request──▶ server ──fork──▶ child: one adapter, texts of one group, one by one
         ◀──report───        ◀─answers─     (a pipe for each child)

The server imports adapters and evaluates no text. A child has its own pid and user namespace: it
sees no other process, and when it ends, the kernel ends every process that it has started. Without
namespaces the server becomes the parent of processes that a child leaves behind, and kills them.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from select import POLLIN, poll
from typing import Any, NoReturn

from async_grpo.verification import namespaces, tasks, usage, verifier
from async_grpo.verification.config import MAX_PROCESSES, Isolation, VerifierConfig
from async_grpo.verification.jail import limit

ANSWER_PIPE = 3
MAX_DESCRIPTORS = 1 << 20
CPU_CLOCK = 2  # CPUCLOCK_SCHED of Linux: with a process id, the clock of its processor time

Grade = Callable[[dict[str, Any]], Iterable[bytes]]


@dataclass(slots=True)
class _Child:
    """A process that grades the samples of one request."""

    request: str  # id
    process: int
    pipe: int  # the server's end
    ends_at: float  # latest end, on the monotonic clock
    killed_for: str = ""  # the limit that it reached
    answers: bytes = b""
    sample_since: float = field(default_factory=time.monotonic)  # start of the present sample
    cpu_s: float = 0.0  # processor time of the process alone, before this sample
    family_before_s: float = 0.0  # of the process and its descendants, before this sample
    family_cpu_s: float = 0.0  # of the process and its descendants, in this sample
    is_connected: bool = False  # one of them has held a connection during this sample
    held_mib: float = 0.0  # memory of all of them, now

    def read(self) -> None:
        """Read the pipe; a new answer starts the limits of the next sample."""
        num_known = len(self.answers)
        while len(self.answers) <= tasks.MAX_ANSWERS_BYTES:
            try:
                data = os.read(self.pipe, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                break
            self.answers += data
        if b"\n" in self.answers[num_known:]:
            self.sample_since, self.cpu_s = time.monotonic(), self.cpu_now()
            self.family_before_s, self.is_connected = usage.cpu_seconds(self.family()), False

    def family(self) -> list[int]:
        """The process and its descendants."""
        return [self.process, *usage.descendants(self.process, most=MAX_PROCESSES)]

    def reached(self, config: VerifierConfig) -> str:
        """The limit that the child has reached; empty: none."""
        now, family = time.monotonic(), self.family()
        self.family_cpu_s = usage.cpu_seconds(family) - self.family_before_s
        self.is_connected = self.is_connected or usage.hold_connection(family)
        self.held_mib = usage.held_mib(family, limit_mib=config.memory_mib)
        if now >= min(self.ends_at, self.sample_since + config.wall_s):
            return "time"
        if self.cpu_now() - self.cpu_s >= config.timeout_s:
            return "processor"
        if len(self.answers) > tasks.MAX_ANSWERS_BYTES:
            return "answers"
        if len(family) > MAX_PROCESSES:
            return "processes"
        if self.held_mib > config.memory_mib:
            return "memory"
        return ""

    def cpu_now(self) -> float:
        """Seconds of processor time that the process alone has used."""
        try:
            return time.clock_gettime(~self.process << 3 | CPU_CLOCK)
        except OSError:  # it has ended
            return self.cpu_s


class ForkServer:
    """Serves one pool, until the pool closes the connection."""

    def __init__(self, pool: socket.socket, isolation: Isolation, config: VerifierConfig) -> None:
        self._pool = pool
        self._isolation = isolation
        self._config = config
        self._children: dict[int, _Child] = {}  # by pidfd, which is readable once they have ended
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY) if isolation.confined else -1
        self._next_look = 0.0
        self._poll = poll()
        self._poll.register(pool, POLLIN)

    def serve(self, grade: Grade) -> None:
        """Fork a child for each request, which calls `grade` on it."""
        while True:
            wait_s = max(0.0, self._next_look - time.monotonic())
            wait_ms = wait_s * 1000 + 1 if self._children else None  # poll rounds
            ready = {descriptor for descriptor, _ in self._poll.poll(wait_ms)}
            for ended in ready & self._children.keys():
                self._reap(ended)
            if time.monotonic() >= self._next_look:
                self._look()
            if self._pool.fileno() in ready:
                try:
                    request = tasks.receive(self._pool)
                except (EOFError, ConnectionError):  # in a namespace all end with this process
                    self._children.clear()
                    return self._end_strays()
                self._start(request, grade)

    def _start(self, request: dict[str, Any], grade: Grade) -> None:
        ours, theirs = os.pipe()
        try:
            process = self._fork_apart()
        except OSError as error:
            os.close(ours)
            os.close(theirs)
            self._report(request["id"], {"failed": str(error)})
            return
        if process == 0:
            _become(theirs, self._isolation, grade(request))
        os.close(theirs)
        os.set_blocking(ours, False)
        ended = os.pidfd_open(process)
        ends_at = time.monotonic() + self._config.child_s
        self._children[ended] = _Child(request["id"], process, ours, ends_at)
        self._poll.register(ended, POLLIN)

    def _fork_apart(self) -> int:
        """Fork a child that is the first process of a pid namespace."""
        if not self._isolation.confined:
            return os.fork()
        namespaces.unshare(namespaces.NEW_PIDS)
        process = -1
        try:
            process = os.fork()
        finally:
            if process != 0:
                namespaces.rejoin_pids(self._own_pids)
        return process

    def _reap(self, ended: int) -> None:
        """Report a child that has ended, once none of its descendants runs."""
        child = self._children.pop(ended)
        self._poll.unregister(ended)
        os.close(ended)
        _, status, used = os.wait4(child.process, 0)
        self._end_strays()
        child.read()
        os.close(child.pipe)
        report = {
            "exit_code": os.waitstatus_to_exitcode(status),
            "cpu_s": used.ru_utime + used.ru_stime - child.cpu_s,
            "memory_mib": max(used.ru_maxrss / 1024, child.held_mib),
            "killed_for": child.killed_for,
            "is_connected": child.is_connected,
            "family_cpu_s": child.family_cpu_s,
            "answers": child.answers[: tasks.MAX_ANSWERS_BYTES].decode("latin-1"),
        }
        self._report(child.request, report)

    def _report(self, request: str, report: dict[str, Any]) -> None:
        self._pool.sendall(tasks.encode({"id": request} | report))

    def _look(self) -> None:
        """Kill the children that have reached a limit."""
        started = time.thread_time()
        for child in self._children.values():
            child.read()
            child.killed_for = child.killed_for or child.reached(self._config)
            if child.killed_for:
                os.kill(child.process, signal.SIGKILL)
        self._end_strays()
        most = max((child.held_mib for child in self._children.values()), default=0.0)
        looked_s = time.thread_time() - started
        room_mib = self._config.memory_mib - most
        self._next_look = time.monotonic() + usage.pause_s(room_mib=room_mib, looked_s=looked_s)

    def _end_strays(self) -> None:
        """Without namespaces: kill the children of this process that are of no request."""
        if self._isolation.confined:
            return
        ours = {child.process for child in self._children.values()}
        while strays := set(usage.children(os.getpid())) - ours:
            for process in strays:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


def _become(answers: int, isolation: Isolation, graded: Iterable[bytes]) -> NoReturn:
    """Run the child from start to end; it never returns into the server's code."""
    try:
        _shut_in(answers, isolation)
        for answer in graded:
            os.write(ANSWER_PIPE, answer)
        os._exit(0)
    finally:
        os._exit(1)


def _shut_in(answers: int, isolation: Isolation) -> None:
    """Confine the child: it keeps no descriptor, session or capability of the server."""
    os.setsid()
    if not isolation.confined:
        namespaces.prctl(namespaces.PR_SET_PDEATHSIG, signal.SIGKILL)
    else:  # with the server's capabilities, which the next steps drop
        namespaces.unshare(namespaces.NEW_MOUNTS)
        namespaces.mount_proc(is_for_root=isolation.uid is None and os.geteuid() == 0)
        if isolation.scratch_mib:
            namespaces.mount_tmpfs("/dev/shm", size_mib=isolation.scratch_mib)
    if isolation.uid is not None:
        os.setgroups([])
        os.setgid(isolation.uid)
        os.setuid(isolation.uid)
    else:
        namespaces.prctl(namespaces.PR_SET_DUMPABLE, 1)  # its user owns its /proc files again
        if isolation.confined:
            namespaces.enter_user_namespace(seen_as=isolation.seen_as)
            limit(resource.RLIMIT_NPROC, 2 * MAX_PROCESSES)  # counts this request's alone
    namespaces.drop_capabilities()
    nothing = os.open(os.devnull, os.O_RDWR)
    if answers != ANSWER_PIPE:
        os.dup2(answers, ANSWER_PIPE, inheritable=False)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.closerange(ANSWER_PIPE + 1, MAX_DESCRIPTORS)


def _probe(isolation: Isolation) -> NoReturn:
    """Confine a child as for a request, and exit with 0, or with the reason on standard error."""
    namespaces.unshare(namespaces.NEW_PIDS)
    child = os.fork()
    if child == 0:
        try:
            _shut_in(os.dup(1), isolation)
            os._exit(0)
        except OSError as error:
            os.write(2, str(error).encode())
        finally:
            os._exit(1)
    os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


def main() -> None:
    """`python -m async_grpo.verification.fork_server DESCRIPTOR`, or `probe ISOLATION`"""
    if sys.argv[1] == "probe":
        _probe(Isolation(**json.loads(sys.argv[2])))
    pool = socket.socket(fileno=int(sys.argv[1]))
    pool.setblocking(True)
    orders = tasks.receive(pool)
    config, isolation = VerifierConfig(**orders["config"]), Isolation(**orders["isolation"])
    namespaces.prctl(namespaces.PR_SET_NO_NEW_PRIVS, 1)
    if filtered := namespaces.seccomp_filter("grader"):
        namespaces.refuse_calls(filtered)
    # Processes that a child leaves behind become ours; no other process may read our memory.
    namespaces.prctl(namespaces.PR_SET_CHILD_SUBREAPER, 1)
    namespaces.prctl(namespaces.PR_SET_DUMPABLE, 0)
    # Sockets import this late, when a request of root's can no longer read a closed home.
    import encodings.idna  # noqa: F401

    pool.sendall(tasks.encode({"preloaded": True}))
    adapters, greeting = verifier.load(config)
    gc.collect()
    gc.freeze()  # collections in a child then leave these objects' shared memory unwritten
    pool.sendall(tasks.encode(greeting))
    if not greeting["load_error"]:
        ForkServer(pool, isolation, config).serve(partial(verifier.grade, adapters, config))
    os._exit(0)


if __name__ == "__main__":
    main()
