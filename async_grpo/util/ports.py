"""Finds a free port for a process that is about to start."""

from __future__ import annotations

import contextlib
import random
import socket

PORTS = 20_000, 32_000  # above those of Ray's workers, below those of connections


def free_port(address: str = "127.0.0.1") -> int:
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
