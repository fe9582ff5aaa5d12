"""What the kernel refuses to programs of a model's and to graders, whatever they try."""

import errno
import os
import re
import runpy
import struct
import time
from pathlib import Path

import pytest

from async_grpo.verification import jailer
from async_grpo.verification.namespaces import seccomp_filter

REPOSITORY = Path(__file__).parents[2]
TOOL = runpy.run_path(str(REPOSITORY / "tools" / "seccomp_filters.py"))
MACHINES = list(TOOL["MACHINES"])
HEADERS = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
WANTED = set(
    """io_uring_setup io_uring_enter io_uring_register add_key request_key keyctl ptrace bpf
    perf_event_open userfaultfd kexec_load kexec_file_load init_module finit_module
    delete_module""".split()  # noqa: SIM905
)
WANTED_OF_JAILS = WANTED | set(
    """clone3 unshare setns mount umount2 pivot_root open_tree move_mount fsopen fsconfig fsmount
    fspick mount_setattr memfd_create shmget""".split()  # noqa: SIM905
)
NEW = {"CLONE_NEWNS": 0x20000, "CLONE_NEWCGROUP": 0x2000000, "CLONE_NEWUTS": 0x4000000,
       "CLONE_NEWIPC": 0x8000000, "CLONE_NEWUSER": 0x10000000, "CLONE_NEWPID": 0x20000000,
       "CLONE_NEWNET": 0x40000000}  # fmt: skip
FORK, THREAD = 0x01200011, 0x003D0F00  # flags as the C library gives them
ALLOWED = 0


def calls(kind):
    """{name: its numbers by machine} of what is refused, with EPERM or as unknown."""
    return (
        TOOL["JAIL"] | TOOL["UNKNOWN_TO_JAILS"]
        if kind == "jail"
        else TOOL["GRADER"] | TOOL["UNKNOWN_TO_GRADERS"]
    )


def decide(program, *, number, arch, args=(0,) * 6):
    """The error that a call is refused with, by the rules of classic BPF; 0: it is allowed."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *args)
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    at, held = 0, 0
    while True:
        operation, if_so, if_not, operand = code[at]
        at += 1
        if operation == 0x20:  # load a word
            (held,) = struct.unpack_from("=I", data, operand)
        elif operation == 0x06:  # return
            return ALLOWED if operand == 0x7FFF0000 else operand ^ 0x00050000
        else:
            holds = {0x15: held == operand, 0x35: held >= operand, 0x45: held & operand}
            at += if_so if holds[operation] else if_not


def filters():
    for kind in ("jail", "grader"):
        for which, machine in enumerate(MACHINES):
            file = REPOSITORY / "async_grpo" / "verification" / f"{kind}-{machine}.bpf"
            yield kind, which, TOOL["MACHINES"][machine], file.read_bytes()


def test_the_package_holds_the_filters_that_the_script_writes():
    folder = REPOSITORY / "async_grpo" / "verification"
    held = {file.name: file.read_bytes() for file in folder.glob("*.bpf")}
    assert held == TOOL["files"](), "run python tools/seccomp_filters.py"


def test_every_call_of_the_table_is_refused_and_no_other():
    for kind, which, arch, program in filters():
        refused = {numbers[which] for numbers in calls(kind).values()}
        for number in range(600):
            error = decide(program, number=number, arch=arch)
            assert (error in (errno.EPERM, errno.ENOSYS)) == (number in refused), (kind, number)
            assert (error == ALLOWED) == (number not in refused)
    assert set(calls("grader")) >= WANTED
    assert set(calls("jail")) >= WANTED_OF_JAILS
    clone3 = TOOL["UNKNOWN_TO_JAILS"]["clone3"]
    for kind, which, arch, program in filters():
        unknown = decide(program, number=clone3[which], arch=arch) == errno.ENOSYS
        assert unknown == (kind == "jail")  # whose C library then takes `clone`


def test_a_jail_forks_and_starts_threads_and_makes_no_namespace():
    for kind, which, arch, program in filters():
        for flags in (FORK, THREAD):
            args = (flags, 0, 0, 0, 0, 0)
            number = TOOL["CLONE"][which]
            assert decide(program, number=number, arch=arch, args=args) == ALLOWED
            for new in NEW.values():
                args = (flags | new, 0, 0, 0, 0, 0)
                error = decide(program, number=number, arch=arch, args=args)
                assert error == (errno.EPERM if kind == "jail" else ALLOWED)


@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [(0x22, False), (0x02, False), (0x01, False), (0x4022, False), (0x21, True), (0x23, True)],
)
def test_a_jail_shares_no_memory_without_a_file(flags, is_refused):
    for kind, which, arch, program in filters():
        args = (0, 4096, 3, flags, 2**32 - 1, 0)
        error = decide(program, number=TOOL["MMAP"][which], arch=arch, args=args)
        assert error == (errno.EPERM if is_refused and kind == "jail" else ALLOWED)


def test_another_abi_of_the_machine_has_no_call_at_all():
    for _, _, arch, program in filters():
        for number in (0, 1, 39, 172):
            assert decide(program, number=number, arch=0x40000003) == errno.ENOSYS  # i386
            if arch == TOOL["MACHINES"]["x86_64"]:
                number |= 0x40000000  # x32
                assert decide(program, number=number, arch=arch) == errno.ENOSYS


@pytest.mark.parametrize("which", [0, 1], ids=MACHINES)
def test_the_numbers_are_those_of_the_kernel(which):
    if not os.path.exists(HEADERS[which]):
        pytest.skip("needs the headers of the C library")
    text = Path(HEADERS[which]).read_text()
    known = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", text))
    table = calls("jail") | {"clone": TOOL["CLONE"], "mmap": TOOL["MMAP"]}
    found = {name: int(known[name]) for name in table if name in known}
    assert len(found) >= len(table) - 3  # that are newer than these headers
    assert found == {name: table[name][which] for name in found}


def test_a_machine_without_a_filter_has_no_jail(monkeypatch):
    assert seccomp_filter("jail") and seccomp_filter("grader")
    monkeypatch.setattr(jailer, "FILTER", b"")
    jailer.what_is_missing.cache_clear()
    try:
        assert "seccomp" in jailer.what_is_missing()
    finally:
        jailer.what_is_missing.cache_clear()


TRY = """
import ctypes, os, subprocess, threading
library = ctypes.CDLL(None, use_errno=True)
library.syscall.restype = ctypes.c_long
def tried(number, *args):
    ctypes.set_errno(0)
    done = library.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, args or (0,) * 6))
    if done == 0 and args:
        os._exit(0)  # of a clone that was made
    return ctypes.get_errno() if done == -1 else 0
"""
HOW_A_PROGRAM_LIVES = """
started = []
thread = threading.Thread(target=started.append, args=(1,))
thread.start()
thread.join()
child = os.fork()
if child == 0:
    os._exit(7)
assert started == [1] and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
for descriptor in range(3, 64):
    try:
        os.fstat(descriptor)
        print("holds", descriptor, os.fstat(descriptor))
    except OSError:
        pass
print("done")
"""


@pytest.mark.integration
def test_a_jailed_program_is_refused_each_call_and_holds_no_descriptor():
    if jailer.what_is_missing():
        pytest.skip(f"this system allows no jail: {jailer.what_is_missing()}")
    which = MACHINES.index(os.uname().machine)
    numbers = {name: number[which] for name, number in calls("jail").items()}
    clones = {name: TOOL["CLONE"][which] for name in NEW}
    code = (
        f"{TRY}\nfor name, number in {numbers!r}.items(): print(name, tried(number))\n"
        f"new = {NEW!r}\n"
        f"for name, number in {clones!r}.items(): print(name, tried(number, new[name] | 17))\n"
        f"{HOW_A_PROGRAM_LIVES}"
    )
    result = jailer.run_program(code, b"", deadline=time.monotonic() + 60, cpu_s=20)
    *said, last = result.output.decode().splitlines()
    assert (result.ending, last) == ("ended", "done")
    allowed = (str(errno.EPERM), str(errno.ENOSYS))
    assert [line for line in said if line.split()[1] not in allowed] == []
    assert [line.split()[0] for line in said] == [*numbers, *clones]
