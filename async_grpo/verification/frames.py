"""Messages between the pool and its verifier processes: plain JSON behind its length.

Nothing is unpickled: what a text has taken over may send any bytes, and they stay bytes.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from typing import Any

LENGTH = struct.Struct("!I")
MAX_TASK_BYTES = 256 << 20
MAX_ANSWER_BYTES = 64 << 10


class FrameError(Exception):
    """Bytes that are no message, or one beyond its bound."""


def encode(message: object, *, max_bytes: int) -> bytes:
    """The message as bytes to send; raises FrameError for what JSON cannot hold."""
    try:
        body = json.dumps(message, allow_nan=True, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"{type(error).__name__}: {error}") from error
    if len(body) > max_bytes:
        raise FrameError(f"{len(body)} bytes, at most {max_bytes} may be sent")
    return LENGTH.pack(len(body)) + body


def send(connection: socket.socket, data: bytes, *, deadline: float) -> None:
    """Send everything; raises TimeoutError at the deadline, OSError when the other end is gone."""
    connection.settimeout(_remaining(deadline))
    connection.sendall(data)


def receive(connection: socket.socket, *, max_bytes: int, deadline: float | None = None) -> Any:
    """The next message.

    Raises EOFError when the other end is closed, TimeoutError at the deadline, FrameError for what
    is no message of at most `max_bytes`.
    """
    (length,) = LENGTH.unpack(_receive_exactly(connection, LENGTH.size, deadline))
    if length > max_bytes:
        raise FrameError(f"{length} bytes announced, at most {max_bytes} may come")
    try:
        return json.loads(_receive_exactly(connection, length, deadline))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"{type(error).__name__}: {error}") from error


def wait(poll: select.poll, *, deadline: float) -> list[int]:
    """The descriptors that have something to read, or have ended; TimeoutError when none has."""
    ready = [descriptor for descriptor, _ in poll.poll(1000 * _remaining(deadline))]
    if not ready:
        raise TimeoutError
    return ready


def _receive_exactly(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    chunks: list[bytes] = []
    while size:
        connection.settimeout(None if deadline is None else _remaining(deadline))
        chunk = connection.recv(min(size, 1 << 20))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining
