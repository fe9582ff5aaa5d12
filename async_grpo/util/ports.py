"""Addresses and interfaces of this machine, and free ports for a process that is about to start."""

from __future__ import annotations

import contextlib
import random
import socket
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
ELSEWHERE = "203.0.113.1"  # of no machine: packets to it would take the default route
PORTS = 20_000, 32_000  # above those of Ray's workers, below those of connections


def is_here(url: str) -> bool:
    """Whether a URL names this machine by loopback, which no proxy reaches.

    >>> [is_here(f"http://{host}:80/run") for host in ("localhost", "127.0.0.2", "[::1]", "agents")]
    [True, True, True, False]
    """
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def interface_to(host: str) -> str:
    """The interface by which this machine reaches `host` over IPv4.

    That of the default route where `host` is this machine itself by loopback, as its own name may
    be in its /etc/hosts. Empty where there is none.
    """
    for target in (host, ELSEWHERE):
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # chooses a route, and sends nothing
            own = probe.getsockname()[0]
            names = (name for name, addresses in interfaces().items() if own in addresses)
            if not own.startswith("127.") and (name := next(names, "")):
                return name
    return ""


def interfaces() -> dict[str, list[str]]:
    """{interface: its addresses} of this machine."""
    import psutil  # not for --help

    return {n: [each.address for each in own] for n, own in psutil.net_if_addrs().items()}


def free_port(address: str = LOOPBACK) -> int:
    """A port that is free now at an address of this machine.

    It is outside the range of outgoing connections, one of which could otherwise take it before the
    process listens.

    >>> PORTS[0] <= free_port() < PORTS[1]
    True
    """
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
