"""Both sides of tests that call generated functions in another process.

    test process  ── call: name, plain arguments ──▶  process of the generated code
                  ◀── plain value, or an exception's name ──

Only the test process knows the expected results, and it receives plain values only: generated code
can neither patch an `assert`, nor exit with success, nor return an object equal to everything.
Inside a jail this text follows that of `jail`, and imports the standard library only.
"""

import ast
import builtins
import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

MAX_CALL_BYTES = 4 << 20
MAX_ITEMS = 100_000  # of an iterator
Message = dict[str, Any]  # JSON, whose values the other side has chosen
COLLECTIONS: dict[str, Callable[[list[Any]], object]] = {
    "tuple": tuple,
    "set": set,
    "iterator": iter,
    "dict": dict,
}
PASSED, FAILED, UNABLE = b"passed", b"failed", b"unable"


class NotPlainError(TypeError):
    """A value that cannot be sent to another process."""


class RemoteError(Exception):
    """The generated code has raised an exception."""


class Wire:
    """A socket to the other side; without timeouts, as the verifier ends both processes."""

    def __init__(self, descriptor: int) -> None:
        sys.set_int_max_str_digits(0)
        self._reader = os.fdopen(descriptor, "rb")
        self._writer = os.fdopen(descriptor, "wb", buffering=0, closefd=False)

    def send(self, message: Message) -> None:
        line = json.dumps(message).encode("ascii") + b"\n"
        if len(line) > MAX_CALL_BYTES:
            raise ValueError(f"a call of {len(line)} bytes")
        while line:
            line = line[self._writer.write(line) :]

    def receive(self) -> Message:
        line = self._reader.readline(MAX_CALL_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("a call is an object")
        return message


def serve_calls(take_orders: Callable[[], tuple[Message, str]]) -> NoReturn:
    """Run the code, then answer calls of its names until the tests have ended."""
    orders, code = take_orders()
    wire = Wire(orders["peer"])
    names: Message = {"__name__": "solution"}
    handles: dict[int, object] = {}
    exec(compile(code, "solution", "exec"), names)
    while True:
        call = wire.receive()
        try:
            target = names if call["of"] is None else handles[call["of"]]
            function = target[call["name"]] if target is names else getattr(target, call["name"])
            arguments = [_decode(value, wire) for value in call["args"]]
            keywords = {key: _decode(value, wire) for key, value in call["kwargs"].items()}
            reply = {"value": _encode(function(*arguments, **keywords), handles)}
        except BaseException as error:  # the process boundary: the tests get the exception's name
            reply = {"raised": type(error).__name__}
        wire.send(reply)


def run_tests(take_orders: Callable[[], tuple[Message, str]]) -> NoReturn:
    """Run the tests in order, and print the verdict and its reason."""
    orders, text = take_orders()
    wire, given = Wire(orders["peer"]), json.loads(text)
    verdict, reason = PASSED, ""
    try:
        for number, test in enumerate(given["tests"], start=1):
            names = _names(given, test, wire)
            reason = f"test {number}"
            exec(compile(test, reason, "exec"), names)
    except NotPlainError as error:
        verdict, reason = UNABLE, f"{reason}: {error}"
    except BaseException as error:  # the process boundary: a test that does not pass has failed
        verdict, reason = FAILED, f"{reason}: {type(error).__name__}"
    os.write(1, verdict + b" " + reason.encode("utf-8", "replace")[:300])
    os._exit(0)


def _names(given: Message, test: str, wire: Wire) -> dict[str, object]:
    """The globals of a test: the setup's, and a `Remote` for each name that the solution defines.

    A builtin's name is the solution's if the data says that the solution defines it.
    """
    names: dict[str, object] = {"__name__": "tests"}
    exec(compile(given["setup"], "setup", "exec"), names)
    used = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    for name in used - set(names):
        if name in given["defines"]:
            names[name] = Remote(wire, None, name)
        elif name in sys.stdlib_module_names:
            names[name] = importlib.import_module(name)
        elif not hasattr(builtins, name):
            names[name] = Remote(wire, None, name)
    return names


class Remote:
    """A function or class of the generated code, or a method of an object, for tests to call."""

    def __init__(self, wire: Wire, of: int | None, name: str) -> None:
        self._call = (wire, of, name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        wire, of, name = self._call
        plain = {key: _encode(value, None) for key, value in kwargs.items()}
        wire.send(
            {"of": of, "name": name, "args": [_encode(v, None) for v in args], "kwargs": plain}
        )
        reply = wire.receive()
        if "value" not in reply:
            raise RemoteError(str(reply.get("raised"))[:100])
        return _decode(reply["value"], wire)


class RemoteObject:
    """An object that lives in the process of the generated code; equal to itself alone."""

    def __init__(self, wire: Wire, handle: int) -> None:
        self._place = (wire, handle)

    def __getattr__(self, name: str) -> Remote:
        return Remote(*self._place, name)


def _encode(value: Any, handles: dict[int, object] | None) -> object:
    """The value as JSON with its type; for another object a handle, under which it stays here."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_encode(item, handles) for item in value]
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[_encode(k, handles), _encode(v, handles)] for k, v in value.items()]}
    for kind, types in (("tuple", tuple), ("set", (set, frozenset))):
        if isinstance(value, types):
            return {kind: [_encode(item, handles) for item in value]}
    if hasattr(value, "__next__") or isinstance(value, range):
        items = itertools.islice(value, MAX_ITEMS)
        return {"iterator": [_encode(item, handles) for item in items]}
    if handles is None:
        raise NotPlainError(f"a {type(value).__name__} cannot be an argument, only plain values")
    handles[id(value)] = value
    return {"object": id(value)}


def _decode(value: object, wire: Wire) -> object:
    """The value that `_encode` has made JSON of; a handle becomes a `RemoteObject`."""
    if isinstance(value, list):
        return [_decode(item, wire) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "object":
        return RemoteObject(wire, int(content))
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    return COLLECTIONS[kind]([_decode(item, wire) for item in content])
