"""The process that generated code runs in: no network, no files but Python's own, hard limits.

Run as a program of its own, so that its memory holds nothing but the code: no expected results, no
environment, no descriptors of the verifier. It opens standard input with its orders and the code;
what follows there is the code's input.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import sysconfig

HOME = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, HOME)

from async_grpo.verification import namespaces  # noqa: E402

TYPE_CHECKING = False  # a run is a few dozen milliseconds, and `typing` would be a tenth of it
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

NOBODY = 65534
LENGTH_BYTES = 8
IS_SET_UP = b"\x01"
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
EVERYTHING = (
    namespaces.NEW_PIDS | namespaces.NEW_MOUNTS | namespaces.NEW_NETWORK | namespaces.NEW_IPC
)


def main() -> None:
    """`python jail.py STATUS_DESCRIPTOR`"""
    status = int(sys.argv[1])
    orders = json.loads(_read_block())
    code = _read_block().decode("utf-8", "surrogatepass")
    if orders["role"] != "program":
        importlib.import_module("async_grpo.verification.jail_calls")
    sys.path.remove(HOME)
    namespaces.forbid_new_privileges()
    if orders["confined"]:
        _or_tell(status, lambda: namespaces.enter_user_namespace(EVERYTHING, becoming=NOBODY))
    inmate = os.fork()
    if inmate == 0:
        _live(orders, code, status)
    os.close(status)
    for standard in (0, 1):
        os.close(standard)
    _, ended = os.waitpid(inmate, 0)
    os._exit(1 if ended else 0)


def _live(orders: dict[str, Any], code: str, status: int) -> NoReturn:
    """Set up everything, tell so, and become the code."""
    _or_tell(status, lambda: _shut_in(orders))
    os.write(status, IS_SET_UP)
    os.close(status)
    try:
        _role(orders)(code)
    except SystemExit as leaving:
        _flush_and_exit(leaving.code)
    except BaseException:  # the process boundary: whatever the code does is one exit code
        _flush_and_exit(1)
    _flush_and_exit(0)


def _or_tell(status: int, step: Callable[[], object]) -> None:
    try:
        step()
    except OSError as error:
        os.write(status, str(error).encode("utf-8", "replace")[:300])
        os._exit(1)


def _shut_in(orders: dict[str, Any]) -> None:
    namespaces.die_with_parent(signal.SIGKILL)
    if orders["confined"]:
        _move_into_empty_root(files_mib=orders["files_mib"])
    _limit(orders)
    namespaces.drop_capabilities()


def _role(orders: dict[str, Any]) -> Callable[[str], object]:
    if orders["role"] == "program":
        return lambda code: exec(compile(code, "program", "exec"), {"__name__": "__main__"})
    peer, calls = orders["peer"], sys.modules["async_grpo.verification.jail_calls"]
    if orders["role"] == "solution":
        return lambda code: calls.serve_calls(code, peer)
    return lambda code: calls.run_tests(json.loads(code), peer)


def _flush_and_exit(code: object) -> NoReturn:
    try:
        sys.stdout.flush()
    finally:
        os._exit(code if isinstance(code, int) and 0 <= code < 256 else int(code is not None))


def _move_into_empty_root(*, files_mib: int) -> None:
    """A new root that holds libraries and Python's, read-only, and an empty /tmp of a few MiB."""
    flags = namespaces.MS_REC | namespaces.MS_SLAVE
    namespaces.mount("none", "/", flags=flags)
    libraries = _libraries()
    root = "/tmp"
    namespaces.mount("none", root, "tmpfs", flags=namespaces.MS_NOSUID, options="size=1m,mode=755")
    for folder in libraries:
        _show(folder, root)
    for device in DEVICES:
        _touch(root + device)
        namespaces.mount(device, root + device, flags=namespaces.MS_BIND)
    os.mkdir(root + "/old")
    os.mkdir(root + "/tmp")
    namespaces.pivot_root(root, root + "/old")
    os.chdir("/")
    options = f"size={files_mib}m,nr_inodes=4096"
    namespaces.mount("none", "/tmp", "tmpfs", flags=namespaces.MS_NOSUID, options=options)
    namespaces.detach_mount("/old")
    namespaces.mount("none", "/", flags=namespaces.MS_REMOUNT | namespaces.MS_RDONLY)
    os.chdir("/tmp")


def _libraries() -> list[str]:
    """Folders of shared libraries and of the standard library; none of them lies in another."""
    wanted = [*LIBRARIES, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    wanted += [f"{sys.base_prefix}/lib"]
    found = sorted({os.path.realpath(path) for path in wanted if os.path.isdir(path)})
    aliases = [path for path in LIBRARIES if os.path.islink(path)]
    outer = [path for path in found if not any(path.startswith(f"{other}/") for other in found)]
    return aliases + outer


def _show(folder: str, root: str) -> None:
    there = root + folder
    if os.path.islink(folder):
        os.symlink(os.readlink(folder), there)
        return
    os.makedirs(there)
    namespaces.mount(folder, there, flags=namespaces.MS_BIND | namespaces.MS_REC)
    namespaces.mount_read_only(there)


def _touch(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY))


def _limit(orders: dict[str, Any]) -> None:
    for kind, limit in (
        (resource.RLIMIT_AS, orders["memory_mib"] << 20),
        (resource.RLIMIT_CPU, orders["cpu_s"]),
        (resource.RLIMIT_FSIZE, orders["files_mib"] << 20),
        (resource.RLIMIT_NPROC, orders["processes"]),  # of this namespace's user; not for root
        (resource.RLIMIT_NOFILE, orders["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        if kind == resource.RLIMIT_NPROC and not orders["confined"]:
            continue  # it would count everything that the user runs
        _, hard = resource.getrlimit(kind)
        allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (allowed, allowed))


def _read_block() -> bytes:
    """A length and as many bytes, unbuffered: what follows is not ours."""
    length = int(_read_exactly(LENGTH_BYTES))
    return _read_exactly(length)


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(0, min(size - len(data), 1 << 16))
        if not chunk:
            raise EOFError("the orders are incomplete")
        data += chunk
    return data


if __name__ == "__main__":
    main()
