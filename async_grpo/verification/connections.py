"""Connections of processes to somebody else: what a grader that overruns may have waited for."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence

from async_grpo.verification.processes import links

TABLES = ("tcp", "tcp6", "udp", "udp6")
LIVE = {"01", "02", "04", "05"}  # established, being made, closed by this side alone
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_DUMP_REQUEST = 4, 20, 0x301
UDIAG_SHOW_PEER, UNIX_DIAG_PEER = 4, 2
REQUEST = struct.Struct("=IHHII BBHIIIII")
# Length and kind of the message; the socket's inode; of the first attribute its kind and value.
ANSWER = struct.Struct("=IH14xI8x2xHI")


def hold_connection(processes: Sequence[int]) -> bool:
    """Whether one of them is connected, or is being connected, to who is none of them.

    A port of their own counts too, as nothing tells it from somebody else's; a pair of sockets and
    a listener do not.
    """
    held = {process: _sockets(process) for process in processes}
    ours = frozenset[int]().union(*held.values())
    return any(sockets & _live(process) for process, sockets in held.items() if sockets) or (
        bool(ours) and any(own in ours and peer not in ours for own, peer in _unix_pairs())
    )


def _sockets(process: int) -> frozenset[int]:
    """The sockets that a process holds, by inode."""
    return frozenset(int(link[8:-1]) for _, link in links(process) if link.startswith("socket:["))


def _live(process: int) -> frozenset[int]:
    """Sockets of the process' network that lead, or will lead, to another one."""
    found = set()
    for table in TABLES:
        try:
            with open(f"/proc/{process}/net/{table}") as file:
                lines = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        found |= {int(words[9]) for words in lines if words[3] in LIVE}
    return frozenset(found)


def _unix_pairs() -> Iterator[tuple[int, int]]:
    """Each connected unix socket that we can see, and the one that it is connected to.

    The kernel tells it over netlink alone (`sock_diag(7)`).
    """
    header = REQUEST.size, SOCK_DIAG_BY_FAMILY, NLM_F_DUMP_REQUEST, 1, 0
    every = socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, UDIAG_SHOW_PEER, 0, 0
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as kernel:
            kernel.send(REQUEST.pack(*header, *every))
            while True:
                data, offset = kernel.recv(1 << 18), 0
                while offset < len(data):
                    whole = data[offset : offset + ANSWER.size].ljust(ANSWER.size, b"\0")
                    length, kind, own, attribute, peer = ANSWER.unpack(whole)
                    if kind != SOCK_DIAG_BY_FAMILY:  # the end, or an error
                        return
                    if attribute == UNIX_DIAG_PEER:
                        yield own, peer
                    offset += length + -length % 4
    except OSError:
        return
