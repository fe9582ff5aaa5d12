"""The program that generated code runs in, in a confinement that holds Python's library alone.

Its memory holds nothing but the code: no expected results, no environment, no descriptors of the
verifier. It opens standard input with its orders and the code; what follows there is the code's
input. `jailer` passes this text to `python -c`: inside there is no file of the package.
"""

import json
import os
import resource
import sys

IS_SET_UP = b"\x01"
CALL = "\nmain(role, code, peer)\n"


def main() -> None:
    """Set up everything, tell so on standard error, and become the code."""
    orders, code = json.loads(_read_block()), _read_block().decode("utf-8", "surrogatepass")
    _limit(orders)
    os.write(2, IS_SET_UP)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    names: dict[str, object] = {"__name__": "__main__"}
    try:
        if orders["calls"]:  # the text of `jail_calls`
            names |= orders | {"__name__": "calls", "code": code}
            exec(compile(orders["calls"] + CALL, "calls", "exec"), names)
        else:
            exec(compile(code, "program", "exec"), names)
    except SystemExit as leaving:
        _flush_and_exit(leaving.code)
    except BaseException:  # the process boundary: whatever the code does is one exit code
        _flush_and_exit(1)
    _flush_and_exit(0)


def _flush_and_exit(code: object) -> None:
    try:
        sys.stdout.flush()
    finally:
        os._exit(code if isinstance(code, int) and 0 <= code < 256 else int(code is not None))


def _limit(orders: dict) -> None:  # no `typing`: a run is milliseconds
    for kind, limit in (
        (resource.RLIMIT_AS, orders["memory_mib"] << 20),
        (resource.RLIMIT_CPU, orders["cpu_s"]),
        (resource.RLIMIT_FSIZE, orders["files_mib"] << 20),
        (resource.RLIMIT_NPROC, orders["processes"]),  # of this namespace's user; not for root
        (resource.RLIMIT_NOFILE, orders["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        if kind == resource.RLIMIT_NPROC and not orders["confined"]:
            continue  # it would count everything that the user runs
        _, hard = resource.getrlimit(kind)
        allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (allowed, allowed))


def _read_block() -> bytes:
    """A length in eight digits and as many bytes, unbuffered: what follows is not ours."""
    return _read_exactly(int(_read_exactly(8)))


def _read_exactly(size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = os.read(0, min(size - len(data), 1 << 16))
        if not chunk:
            raise EOFError("the orders are incomplete")
        data += chunk
    return data


if __name__ == "__main__":
    main()
