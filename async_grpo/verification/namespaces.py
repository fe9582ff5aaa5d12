"""What Linux offers to shut a process in: namespaces, capabilities and a few `prctl` switches.

Every call raises OSError where the system does not allow it.
"""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False  # generated code waits for these imports, see `jail`
if TYPE_CHECKING:
    from collections.abc import Callable

NEW_MOUNTS = 0x00020000
NEW_IPC = 0x08000000
NEW_USERS = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_SLAVE = 4096, 16384, 1 << 19
MS_NOATIME, MS_NODIRATIME, MS_RELATIME = 1024, 2048, 1 << 21
ST_RELATIME = 4096  # of statvfs, whose other switches have mount's values
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
CAPABILITIES_V3 = 0x20080522
# Root's way to its files, and to a user namespace for generated code; nothing that reaches others.
FILE_CAPABILITIES = frozenset({0, 1, 2, 3, 31})  # chown, dac_override, dac_read, fowner, setfcap
NUM_CAPABILITIES = 64

_LIBC = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Leave what is shared with other processes; new pids are for later children only."""
    _check("unshare", _LIBC.unshare(ctypes.c_int(flags)))


def rejoin(descriptor: int, kind: int) -> None:
    """Enter the namespace that a file of /proc/PID/ns stands for."""
    _check("setns", _LIBC.setns(ctypes.c_int(descriptor), ctypes.c_int(kind)))


def mount(source: str, target: str, kind: str = "", *, flags: int = 0, options: str = "") -> None:
    _check(
        f"mount {target}",
        _LIBC.mount(
            source.encode(),
            target.encode(),
            kind.encode() or None,
            ctypes.c_ulong(flags),
            options.encode() or None,
        ),
    )


def mount_proc() -> None:
    """Let /proc tell of this pid namespace instead of the system's."""
    mount("proc", "/proc", "proc", flags=MS_NOSUID | MS_NODEV | MS_NOEXEC)


def mount_read_only(target: str) -> None:
    """Make a bind mount read-only; switches that its origin has locked are kept."""
    held = os.statvfs(target).f_flag
    kept = held & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
    kept |= MS_RELATIME if held & ST_RELATIME else 0
    mount("none", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | kept)


def detach_mount(target: str) -> None:
    _check(f"umount {target}", _LIBC.umount2(target.encode(), ctypes.c_int(MNT_DETACH)))


def pivot_root(new: str, old: str) -> None:
    _check("pivot_root", _LIBC.pivot_root(new.encode(), old.encode()))


def forbid_new_privileges() -> None:
    """No program that is started from here gains rights by its owner or its capabilities."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, whatever their session."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal_number: int) -> None:
    _prctl(PR_SET_PDEATHSIG, signal_number)


def hide_memory() -> None:
    """Other processes of the user may not look into this one, nor steer it."""
    _prctl(PR_SET_DUMPABLE, 0)


def drop_capabilities(*, keep: frozenset[int] = frozenset()) -> None:
    """Give up all rights but `keep`, for this process and whatever it becomes or starts."""
    for capability in set(range(NUM_CAPABILITIES)) - keep:
        _LIBC.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)  # unknown ones fail
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
    held = _held_capabilities() & sum(1 << capability for capability in keep)
    low, high = held & 0xFFFFFFFF, held >> 32
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)  # effective, permitted, inheritable
    _check("capset", _LIBC.capset(header, data))


def enter_user_namespace(flags: int, *, becoming: int | None = None) -> None:
    """Unshare users and what `flags` says; user and group ids stay what they are.

    Root keeps the ids of all users, anybody else only his own: files look and open as before.
    With `becoming`, that is the only user there is, and an alias of the present one.
    """
    close_gate, map_ids = _mapper(os.getpid(), becoming)
    try:
        unshare(NEW_USERS | flags)
    except OSError:
        close_gate()
        raise
    map_ids()


def _mapper(process: int, becoming: int | None) -> tuple[Callable[[], None], Callable[[], None]]:
    """A child in the old user namespace that maps our ids once we are in the new one."""
    gate_read, gate_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(gate_write)
        is_open = os.read(gate_read, 1) == b"m"
        os._exit(_write_maps(process, becoming) if is_open else 0)
    os.close(gate_read)

    def end(message: bytes) -> None:
        os.write(gate_write, message)
        os.close(gate_write)
        _, status = os.waitpid(child, 0)
        if status:
            raise OSError(os.waitstatus_to_exitcode(status), "user ids cannot be mapped")

    return (lambda: end(b"-")), (lambda: end(b"m"))


def _write_maps(process: int, becoming: int | None) -> int:
    keeps_all = becoming is None and os.geteuid() == 0
    try:
        if not keeps_all:
            _write(f"/proc/{process}/setgroups", "deny")
        for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
            alias = own if becoming is None else becoming
            lines = _identity(kind) if keeps_all else f"{alias} {own} 1\n"
            _write(f"/proc/{process}/{kind}_map", lines)
    except OSError as error:
        return error.errno or 1
    return 0


def _identity(kind: str) -> str:
    with open(f"/proc/self/{kind}_map") as file:
        ranges = [line.split() for line in file]
    return "".join(f"{first} {first} {count}\n" for first, _, count in ranges)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _held_capabilities() -> int:
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
    data = (ctypes.c_uint32 * 6)()
    _check("capget", _LIBC.capget(header, data))
    return int(data[1]) | int(data[4]) << 32


def _prctl(option: int, value: int) -> None:
    _check(f"prctl {option}", _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def _check(call: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
