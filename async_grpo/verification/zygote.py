"""The process that verifier processes are forked from: graders are imported in it, once.

Run as a program, never imported by the pool. No text and no code of the user is ever run here.

    pool ──control──▶ watchman ──▶ zygote ──fork──▶ keeper ──fork──▶ verifier (adapters, texts)
      └──────────────── one pipe to each keeper, one to each verifier ────────────┘

Where the system allows it, the zygote lives in a user, pid and mount namespace of its own, and
each keeper in another pid namespace: what is inside sees and signals nothing outside, and ends
with its keeper, as all ends with the watchman. Elsewhere keepers adopt and kill what escapes.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from async_grpo.verification import family, namespaces
from async_grpo.verification.keeper import keep

PRELOADED = (
    "async_grpo.verification.verifier",
    "async_grpo.verification.graders.countdown",
    "async_grpo.verification.graders.library",
    "async_grpo.verification.graders.mathd",
    "async_grpo.verification.graders.symbolic",
)


def main() -> None:
    """`python -m async_grpo.verification.zygote DESCRIPTOR HIDDEN_PATHS`"""
    control = socket.socket(fileno=int(sys.argv[1]))
    hidden: list[str] = json.loads(sys.argv[2])
    namespaces.forbid_new_privileges()
    namespaces.adopt_orphans()
    is_confined = os.environ.pop("ASYNC_GRPO_VERIFIER_NAMESPACES", "") != "0" and _can_confine()
    if is_confined:
        _confine()
    zygote = os.fork()
    if zygote == 0:
        _exit_after(lambda: _serve(control, is_confined=is_confined, hidden=hidden))
    _watch(control, zygote, is_confined=is_confined)


def _can_confine() -> bool:
    """Try it in a child: a process that has failed halfway cannot go back."""
    probe = os.fork()
    if probe == 0:
        _exit_after(_probe)
    _, status = os.waitpid(probe, 0)
    return status == 0


def _probe() -> None:
    _confine()
    inner = os.fork()
    if inner == 0:
        _exit_after(lambda: _settle(hidden=[]))
    _, status = os.waitpid(inner, 0)
    if status:
        raise OSError("a new /proc cannot be mounted")


def _confine() -> None:
    namespaces.enter_user_namespace(namespaces.NEW_PIDS | namespaces.NEW_MOUNTS)


def _settle(*, hidden: list[str]) -> None:
    """See only one's own processes, and none of the files that hold credentials."""
    flags = namespaces.MS_REC | namespaces.MS_SLAVE
    namespaces.mount("none", "/", flags=flags)
    namespaces.mount_proc()
    for path in filter(os.path.exists, hidden):
        if os.path.isdir(path):
            namespaces.mount("none", path, "tmpfs", flags=namespaces.MS_RDONLY, options="size=4k")
        else:
            namespaces.mount(os.devnull, path, flags=namespaces.MS_BIND)


def _watch(control: socket.socket, zygote: int, *, is_confined: bool) -> NoReturn:
    """End everything as soon as the pool or the zygote has ended."""
    heard = family.hear_of_children()
    poll = select.poll()
    poll.register(control, 0)  # its end only: the zygote reads it
    poll.register(heard, select.POLLIN)
    while True:
        events = dict(poll.poll())
        family.drain(heard)
        if control.fileno() in events or zygote in family.reap():
            break
    family.kill_descendants(is_init=False)
    os._exit(0)


def _serve(control: socket.socket, *, is_confined: bool, hidden: list[str]) -> None:
    """Fork a keeper for each pair of pipes that the pool sends, and kill those that it names."""
    namespaces.die_with_parent(signal.SIGKILL)
    namespaces.adopt_orphans()
    if is_confined:
        _settle(hidden=hidden)
    _preload()
    heard = family.hear_of_children()
    keepers: dict[int, int] = {}  # number of the slot, by process id
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(heard, select.POLLIN)
    while True:
        events = dict(poll.poll())
        if heard in events:
            family.drain(heard)
            if _forget(keepers) and not is_confined:
                _kill_strays(keepers)
        if control.fileno() in events and not _obey(control, keepers, is_confined=is_confined):
            return


def _preload() -> None:
    """Import what graders need, and have their parsers build their tables."""
    for name in PRELOADED:
        importlib.import_module(name)
    library = sys.modules["async_grpo.verification.graders.library"]
    library.math_verify_reward(r"\boxed{\frac{1}{2}}", "0.5")
    gc.collect()
    gc.freeze()  # forks share these objects' memory for longer


def _obey(control: socket.socket, keepers: dict[int, int], *, is_confined: bool) -> bool:
    message, descriptors, _, _ = socket.recv_fds(control, 64, 2)
    if not message:  # the pool has ended
        return False
    command, number = message.decode().split()
    if command == "kill":
        for process in [process for process, slot in keepers.items() if slot == int(number)]:
            os.kill(process, signal.SIGKILL)
        return True
    keepers[_fork_keeper(*descriptors, is_confined=is_confined)] = int(number)
    for descriptor in descriptors:
        os.close(descriptor)
    return True


def _fork_keeper(work: int, orders: int, *, is_confined: bool) -> int:
    """The pids of a keeper and what is below it are a namespace of their own."""
    if is_confined:
        ours = os.open("/proc/self/ns/pid", os.O_RDONLY)
        namespaces.unshare(namespaces.NEW_PIDS)
    process = os.fork()
    if process == 0:
        _exit_after(lambda: keep(work, orders, is_confined=is_confined))
    if is_confined:
        namespaces.rejoin(ours, namespaces.NEW_PIDS)
        os.close(ours)
    return process


def _forget(keepers: dict[int, int]) -> bool:
    ended = family.reap()
    for process in ended:
        keepers.pop(process, None)
    return bool(ended)


def _kill_strays(keepers: dict[int, int]) -> None:
    """What a dead keeper has left to us."""
    for process in set(family.children(os.getpid())) - set(keepers):
        family.kill(process)


def _exit_after(work: Callable[[], Any]) -> NoReturn:
    """A forked process' whole life: it never returns into its parent's code."""
    code = 1
    try:
        work()
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
