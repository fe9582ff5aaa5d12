"""Messages between the pool and its verifier processes: plain JSON behind its length.

Nothing is unpickled: what a text has taken over may send any bytes, and they stay bytes.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!I")
MAX_TASK_BYTES = 256 << 20
MAX_ANSWERS_BYTES = 1 << 20  # of one child
MAX_REPORT_BYTES = 8 << 20  # holds as many answers, each byte of them escaped


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


def length_of(head: bytes, *, max_bytes: int) -> int:
    """The length that a frame announces; raises FrameError beyond the bound."""
    (length,) = LENGTH.unpack(head)
    if length > max_bytes:
        raise FrameError(f"{length} bytes announced, at most {max_bytes} may come")
    return int(length)


def decode(body: bytes | str) -> Any:
    """The message in a frame, or in an answer; raises FrameError for what is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"{type(error).__name__}: {error}") from error


def receive(connection: socket.socket, *, max_bytes: int) -> Any:
    """The next message.

    Raises EOFError when the other end is closed, FrameError for no message of at most `max_bytes`.
    """
    length = length_of(_receive_exactly(connection, LENGTH.size), max_bytes=max_bytes)
    return decode(_receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    chunks: list[bytes] = []
    while size:
        chunk = connection.recv(min(size, 1 << 20))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
