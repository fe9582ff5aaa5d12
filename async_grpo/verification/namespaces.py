"""Linux system calls, most of which Python 3.11 lacks; each raises OSError if it is refused."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Literal

NEW_MOUNTS, NEW_USERS, NEW_PIDS = 0x00020000, 0x10000000, 0x20000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC = 4096, 16384
STEERING = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus")
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
CAPABILITIES_V3 = 0x20080522

_LIBC = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Move to new namespaces; a new pid namespace holds later children only."""
    _check("unshare", _LIBC.unshare(ctypes.c_int(flags)))


def rejoin_pids(descriptor: int) -> None:
    """Put later children into a pid namespace, given a descriptor of its file in /proc/PID/ns."""
    _check("setns", _LIBC.setns(ctypes.c_int(descriptor), ctypes.c_int(NEW_PIDS)))


def mount_tmpfs(target: str, *, size_mib: int) -> None:
    """Mount an empty file system in memory over a folder."""
    _mount("tmpfs", target, "tmpfs", options=f"size={size_mib}m,nr_inodes=65536")


def mount_proc(*, is_for_root: bool) -> None:
    """Mount a /proc of this pid namespace; for root, system controls in it are read-only."""
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    _mount("proc", "/proc", "proc", flags=flags)
    for path in filter(os.path.exists, STEERING if is_for_root else ()):
        _mount(path, path, flags=MS_BIND | MS_REC)
        _mount("none", path, flags=flags | MS_BIND | MS_REMOUNT | MS_RDONLY)


def enter_user_namespace(*, seen_as: int) -> None:
    """Move to a user namespace that holds this user only, under the number `seen_as`.

    This process can then neither signal nor read processes outside, though their user is the same,
    and RLIMIT_NPROC counts only processes inside.
    """
    user, group = os.geteuid(), os.getegid()
    unshare(NEW_USERS)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{seen_as} {user} 1"),
        ("gid_map", f"{seen_as} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def has_user(number: int) -> bool:
    """Whether this user namespace has that user: some containers have root alone.

    >>> has_user(os.geteuid())
    True
    """
    with open("/proc/self/uid_map") as file:
        spans = [tuple(map(int, line.split())) for line in file]
    return any(first <= number < first + count for first, _, count in spans)


def drop_capabilities() -> None:
    """Drop all capabilities of this process in its user namespace."""
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
    _check("capset", _LIBC.capset(header, (ctypes.c_uint32 * 6)()))


def seccomp_filter(kind: Literal["jail", "grader"]) -> bytes:
    """The filter in the kernel's format, from `tools/seccomp_filters.py`.

    Empty: this machine's architecture has none.
    """
    path = f"{os.path.dirname(__file__)}/{kind}-{os.uname().machine}.bpf"
    if not os.path.isfile(path):
        return b""
    with open(path, "rb") as file:
        return file.read()


def refuse_calls(program: bytes) -> None:
    """Apply a seccomp filter to this process and its later children, for good."""
    held = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(held))
    mode = ctypes.c_ulong(SECCOMP_MODE_FILTER)
    _check("seccomp", _LIBC.prctl(PR_SET_SECCOMP, mode, header, 0, 0))


def prctl(option: int, value: int) -> None:
    """Set an option of this process, see prctl(2)."""
    _check(f"prctl {option}", _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def _mount(source: str, target: str, kind: str = "", *, flags: int = 0, options: str = "") -> None:
    words = [word.encode() or None for word in (source, target, kind)]
    result = _LIBC.mount(*words, ctypes.c_ulong(flags), options.encode() or None)
    _check(f"mount {target}", result)


def _check(call: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
