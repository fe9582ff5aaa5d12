"""Write the seccomp filters that the package holds: `python tools/seccomp_filters.py`.

One for each kind of process and machine, in the kernel's own form (classic BPF, 8 bytes an
instruction): `async_grpo/verification/jail-x86_64.bpf` and so on. A test holds the files to this
table, tries each call in a real jail, and decodes them with an interpreter of its own.

    jail     what a model wrote: no namespaces, mounts, or memory that no count can see either
    grader   rewards, and fork servers: they make the namespaces of requests and of jails

A call that is refused fails with EPERM, or with ENOSYS where a C library then takes an older call.
"""

from __future__ import annotations

import errno
import struct
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "async_grpo" / "verification"
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
X32 = 0x40000000  # calls of x86_64's third ABI begin here

# Numbers of x86_64 and of aarch64; from 424 on all machines have the same.
GRADER = {
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    # Memory that belongs to no process; a segment outlives its request.
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "memfd_secret": (447, 447),
    "vmsplice": (278, 75),
}  # fmt: skip
JAIL = GRADER | {
    "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
    "memfd_create": (319, 279),
}  # fmt: skip
UNKNOWN_TO_GRADERS = {
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
}  # fmt: skip
# Its flags lie in memory, where no filter can look.
UNKNOWN_TO_JAILS = UNKNOWN_TO_GRADERS | {"clone3": (435, 435)}
# Of a jail: which flags of which argument; any of the first, and then any of the second.
CLONE, NEW_NAMESPACES = (56, 220), (0x7E020000,)
MMAP, ANONYMOUS_SHARED = (9, 222), (0x20, 0x01)
CLONE_FLAGS_AT, MMAP_FLAGS_AT = 16, 16 + 3 * 8  # in struct seccomp_data

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
Instruction = tuple[int, int, int, int]  # code, jump if so, jump if not, operand


def refuse(number: int) -> Instruction:
    return (RETURN, 0, 0, ERRNO | number)


def with_flags(number: int, masks: tuple[int, ...], *, at: int) -> list[Instruction]:
    """Refuse a call whose argument has a flag of each mask; allow it otherwise."""
    tests = [(ANY_BIT, 0, len(masks) - n, mask) for n, mask in enumerate(masks)]
    body = [(LOAD, 0, 0, at), *tests, refuse(errno.EPERM), (RETURN, 0, 0, ALLOW)]
    return [(EQUAL, 0, len(body), number), *body]


def filter_of(kind: str, machine: str) -> list[Instruction]:
    """The program that the kernel runs at each call of a process."""
    which = list(MACHINES).index(machine)
    refused = {"jail": JAIL, "grader": GRADER}[kind]
    unknown = {"jail": UNKNOWN_TO_JAILS, "grader": UNKNOWN_TO_GRADERS}[kind]
    program: list[Instruction] = [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, MACHINES[machine]),
        refuse(errno.ENOSYS),  # an older ABI of the machine, with numbers of its own
        (LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":
        program += [(AT_LEAST, 0, 1, X32), refuse(errno.ENOSYS)]
    for calls, number in ((refused, errno.EPERM), (unknown, errno.ENOSYS)):
        for numbers in calls.values():
            program += [(EQUAL, 0, 1, numbers[which]), refuse(number)]
    if kind == "jail":
        program += with_flags(CLONE[which], NEW_NAMESPACES, at=CLONE_FLAGS_AT)
        program += with_flags(MMAP[which], ANONYMOUS_SHARED, at=MMAP_FLAGS_AT)
    return [*program, (RETURN, 0, 0, ALLOW)]


def files() -> dict[str, bytes]:
    """Each file of the package by its name."""
    return {
        f"{kind}-{machine}.bpf": b"".join(
            struct.pack("=HBBI", *each) for each in filter_of(kind, machine)
        )
        for kind in ("jail", "grader")
        for machine in MACHINES
    }


def main() -> None:
    for name, content in files().items():
        (FOLDER / name).write_bytes(content)


if __name__ == "__main__":
    main()
