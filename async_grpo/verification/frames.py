"""Messages between the pool and its fork servers: plain JSON behind its length.

Nothing is unpickled: what a text has taken over may send any bytes, and they stay bytes.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!I")
MAX_BYTES = 256 << 20  # of a message
MAX_ANSWERS_BYTES = 1 << 20  # of one child


class FrameError(Exception):
    """Bytes that are no message, or one beyond its bound."""


def encode(message: object) -> bytes:
    """The message as bytes to send; raises FrameError for what JSON or a frame cannot hold."""
    try:
        body = json.dumps(message, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"{type(error).__name__}: {error}") from error
    return LENGTH.pack(_bounded(len(body))) + body


def length_of(head: bytes) -> int:
    """The length that a frame announces; raises FrameError beyond the bound."""
    return _bounded(*LENGTH.unpack(head))


def decode(body: bytes | str) -> Any:
    """The message in a frame, or in an answer; raises FrameError for what is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"{type(error).__name__}: {error}") from error


def receive(connection: socket.socket) -> Any:
    """The next message; raises EOFError when the other end is closed."""
    return decode(
        _receive_exactly(connection, length_of(_receive_exactly(connection, LENGTH.size)))
    )


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError
    return data


def _bounded(length: int) -> int:
    if length > MAX_BYTES:
        raise FrameError(f"{length} bytes, at most {MAX_BYTES} may be sent")
    return length
