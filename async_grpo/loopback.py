"""Keeps torch's rendezvous stores off the network where all of their clients are on this machine.

A TCPStore takes whatever anyone sends to it, torchrun even unpickles what it finds there, and torch
has it listen on every interface, whichever address it is given.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from typing import Any


def is_loopback(host: str) -> bool:
    """
    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "10.0.0.1", "node7")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def keep_stores_to_loopback() -> None:
    """From now on, a store of this process that is given a loopback address listens only there."""
    import torch.distributed as dist

    if getattr(dist.TCPStore, "is_local", False):
        return

    class LocalStore(dist.TCPStore):
        is_local = True

        def __init__(self, host_name: str, port: int = 0, *args: Any, **options: Any) -> None:
            serves = options.get("is_master", args[1] if len(args) > 1 else False)
            if serves and is_loopback(host_name) and options.get("master_listen_fd") is None:
                listener = _listen(port)
                port = listener.getsockname()[1]
                options["master_listen_fd"] = listener.detach()  # the store closes it
            super().__init__(host_name, port, *args, **options)

    for name in ("torch.distributed", "torch.distributed.rendezvous"):
        sys.modules[name].TCPStore = LocalStore  # type: ignore[attr-defined]


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener
