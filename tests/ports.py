"""Who listens, and who of them answers from outside this machine.

Finds every listening socket of some processes in /proc, and connects to each port at the machine's
own address instead of the loopback one; Ray's ports are also asked for the cluster's id without a
token.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import procfs

CONNECT_TIMEOUT_S = 3.0
LISTENING = "0A"
# One question of each of Ray's services that changes nothing.
QUESTIONS = (
    "NodeInfoGcsService/GetClusterId",
    "CoreWorkerService/NumPendingTasks",
    "NodeManagerService/GetNodeStats",
    "RayletDriver/KVList",  # the Ray client's server
    "ReporterService/GetTraceback",
    "ObjectManagerService/Pull",
)
NOT_SPOKEN = ("UNIMPLEMENTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN", "INTERNAL")


@dataclass(frozen=True, slots=True)
class Port:
    """One listening socket, and what became of talking to it."""

    process: str
    port: int
    bound_to: str  # an address, or "*" for every interface
    outside: str  # what the machine's other address answers: refused, open, another (process does)
    without_token: str  # what Ray's protocol gets there: its status, or nothing


def scan(pids: set[int], *, outside: str) -> list[Port]:
    """Every listening socket of these processes; one that several have counts once."""
    found: dict[tuple[str, int], Port] = {}
    table = listening_sockets()
    for pid in sorted(pids):
        for inode in _sockets_of(pid):
            if inode in table:
                address, port = table[inode]
                taken = {(outside, port), ("*", port)} & (set(table.values()) - {table[inode]})
                seen = _examine(_name(pid), address, port, outside)
                if taken and seen.outside == "open" and address not in ("*", outside):
                    seen = replace(seen, outside="another")  # whose port has the same number
                found.setdefault(table[inode], seen)
    return list(found.values())


def listening_sockets() -> dict[str, tuple[str, int]]:
    """Address ("*" for all) and port by inode, of IPv4 and IPv6."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING:
                address, _, port = fields[1].partition(":")
                sockets[fields[9]] = (address_of(address), int(port, 16))
    return sockets


def address_of(hexadecimal: str) -> str:
    """As /proc/net/tcp writes it: words of 32 bits in the machine's byte order.

    >>> address_of("0100007F"), address_of("00000000"), address_of("0" * 32)
    ('127.0.0.1', '*', '*')
    >>> address_of("0000000000000000FFFF00000100007F"), address_of("0" * 24 + "01000000")
    ('127.0.0.1', '::1')
    """
    words = [hexadecimal[at : at + 8] for at in range(0, len(hexadecimal), 8)]
    raw = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    if not any(raw):
        return "*"
    if raw[:12] == bytes(10) + b"\xff\xff":
        raw = raw[12:]
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def outside_address() -> str:
    """This machine's address on its network; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        address: str = probe.getsockname()[0]
    if address.startswith("127."):
        raise SystemExit("this machine has no address but the loopback one: nothing to scan from")
    return address


def _examine(process: str, address: str, port: int, outside: str) -> Port:
    here = "127.0.0.1" if address == "*" else address
    return Port(process, port, address, _connect(outside, port), _ask_ray(here, port))


def _connect(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return "refused" if isinstance(error, ConnectionRefusedError) else str(error)
    return "open"


def _ask_ray(host: str, port: int) -> str:
    """The status of a call without a token; empty where none of Ray's services answers."""
    import grpc

    with grpc.insecure_channel(f"{host}:{port}") as channel:
        for question in QUESTIONS:
            try:
                channel.unary_unary(f"/ray.rpc.{question}")(b"", timeout=CONNECT_TIMEOUT_S)
            except grpc.RpcError as error:
                if (status := error.code().name) not in NOT_SPOKEN:
                    return status
                if status != "UNIMPLEMENTED":
                    return ""  # nobody speaks gRPC here
            else:
                return "OK"
    return ""


def _sockets_of(pid: int) -> Iterator[str]:
    with contextlib.suppress(*procfs.GONE):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(*procfs.GONE):
                target = os.readlink(f"/proc/{pid}/fd/{entry}")
                if target.startswith("socket:["):
                    yield target.removeprefix("socket:[").removesuffix("]")


def _name(pid: int) -> str:
    with contextlib.suppress(*procfs.GONE):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        names = [Path(word).name for word in words if word and not word.startswith("-")]
        interesting = [name for name in names[:3] if not name.startswith("python")]
        return (interesting or names or ["?"])[0][:40]
    return "ended"
