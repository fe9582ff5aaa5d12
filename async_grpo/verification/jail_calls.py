"""Tests that call generated functions from another process, and the functions' side of it.

    test process  ── call: name, plain arguments ──▶  process of the generated code
                  ◀── plain value, or what it raised ──

Only the test process knows what is expected, and only plain values reach it: generated code can
neither patch an `assert`, nor leave with a success, nor answer with an object equal to everything.
Inside a jail there is no file of the package: this text is run, and imports the standard library.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import itertools
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

MAX_CALL_BYTES = 4 << 20
MAX_ITEMS = 100_000  # of an iterator
SCALARS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "bytes": bytes.fromhex,
}
COLLECTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "iterator": iter,
}
PASSED, FAILED, UNABLE = b"passed", b"failed", b"unable"


class NotPlainError(TypeError):
    """A value that cannot be sent to another process."""


class RemoteError(Exception):
    """What the generated code raised."""


def main(role: str, code: str, peer: int) -> None:
    """One side of the tests, on a socket to the other."""
    if role == "solution":
        serve_calls(code, peer)
    else:
        run_tests(json.loads(code), peer)


def serve_calls(code: str, peer: int) -> None:
    """Define what the code defines, then answer calls until the tests have ended."""
    connection = socket.socket(fileno=peer)
    names: dict[str, Any] = {"__name__": "solution"}
    handles: dict[int, Any] = {}
    exec(compile(code, "solution", "exec"), names)
    while True:
        call = _receive(connection)
        try:
            target = names if call["of"] is None else handles[call["of"]]
            function = target[call["name"]] if target is names else getattr(target, call["name"])
            arguments = [_decode(value, {}) for value in call["args"]]
            keywords = {key: _decode(value, {}) for key, value in call["kwargs"].items()}
            reply = {"value": _encode(function(*arguments, **keywords), handles)}
        except BaseException as error:  # the process boundary: the tests see that it raised
            reply = {"raised": type(error).__name__}
        _send(connection, reply)


def run_tests(orders: dict[str, Any], peer: int) -> NoReturn:
    """Run the tests one after another; one word on standard output says how they went."""
    connection = socket.socket(fileno=peer)
    verdict, reason = PASSED, ""
    try:
        for number, test in enumerate(orders["tests"], start=1):
            names = _names(orders, test, connection)
            reason = f"test {number}"
            exec(compile(test, reason, "exec"), names)
    except NotPlainError as error:
        verdict, reason = UNABLE, f"{reason}: {error}"
    except BaseException as error:  # the process boundary: a test that does not pass has failed
        verdict, reason = FAILED, f"{reason}: {type(error).__name__}"
    os.write(1, verdict + b" " + reason.encode("utf-8", "replace")[:300])
    os._exit(0)


def _names(orders: dict[str, Any], test: str, connection: socket.socket) -> dict[str, Any]:
    """What a test sees: the setup, and a stand-in for every name that only the solution can have.

    A builtin is the solution's where the data says that the solution is to define it.
    """
    names: dict[str, Any] = {"__name__": "tests"}
    exec(compile(orders["setup"], "setup", "exec"), names)
    used = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    for name in used - set(names):
        if name in orders["defines"]:
            names[name] = Remote(connection, None, name)
        elif name in sys.stdlib_module_names:
            names[name] = importlib.import_module(name)
        elif not hasattr(builtins, name):
            names[name] = Remote(connection, None, name)
    return names


class Remote:
    """A function, a class or an object of the generated code, as tests use it: by calling."""

    def __init__(self, connection: socket.socket, of: int | None, name: str) -> None:
        self._call = (connection, of, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        connection, of, name = self._call
        call = {
            "of": of,
            "name": name,
            "args": [_encode(value, None) for value in args],
            "kwargs": {key: _encode(value, None) for key, value in kwargs.items()},
        }
        _send(connection, call)
        reply = _receive(connection)
        if "value" not in reply:
            raise RemoteError(str(reply.get("raised"))[:100])
        return _decode(reply["value"], {"connection": connection})


class RemoteObject:
    """An object that lives in the process of the generated code; equal to itself alone."""

    def __init__(self, connection: socket.socket, handle: int) -> None:
        self._place = (connection, handle)

    def __getattr__(self, name: str) -> Remote:
        connection, handle = self._place
        return Remote(connection, handle, name)


def _encode(value: Any, handles: dict[int, Any] | None) -> Any:
    """The value as JSON, its type kept; an object that is not plain stays here, under a handle."""
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int | float):
        kind = "int" if isinstance(value, int) else "float"
        return {kind: hex(value) if isinstance(value, int) else float(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    for kind, types in (("list", list), ("tuple", tuple), ("set", (set, frozenset))):
        if isinstance(value, types):
            return {kind: [_encode(item, handles) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_encode(k, handles), _encode(v, handles)] for k, v in value.items()]}
    if hasattr(value, "__next__") or isinstance(value, range):
        items = list(itertools.islice(value, MAX_ITEMS))
        return {"iterator": [_encode(item, handles) for item in items]}
    if handles is None:
        raise NotPlainError(f"a {type(value).__name__} cannot be an argument, only plain values")
    handles[id(value)] = value
    return {"object": id(value)}


def _decode(value: Any, place: dict[str, Any]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    ((kind, content),) = value.items()
    if kind == "object":
        return RemoteObject(place["connection"], int(content))
    if kind == "complex":
        return complex(*map(float.fromhex, content))
    if kind == "dict":
        return {_decode(k, place): _decode(v, place) for k, v in content}
    if kind in SCALARS:
        return SCALARS[kind](content)
    return COLLECTIONS[kind]([_decode(item, place) for item in content])


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode("ascii")
    if len(body) > MAX_CALL_BYTES:
        raise ValueError(f"a call of {len(body)} bytes")
    connection.sendall(len(body).to_bytes(4, "big") + body)


def _receive(connection: socket.socket) -> dict[str, Any]:
    """The next message; no deadline: the verifier ends both processes."""
    size = int.from_bytes(_receive_exactly(connection, 4), "big")
    if size > MAX_CALL_BYTES:
        raise ValueError(f"a call of {size} bytes")
    message = json.loads(_receive_exactly(connection, size))
    if not isinstance(message, dict):
        raise ValueError("a call is an object")
    return message


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data
