"""The program that generated code runs in, in a confinement that holds Python's library alone.

Its memory holds nothing but the code: no expected results, no environment, no descriptors of the
verifier. `jailer` passes this text to `python -c`, for tests of functions with that of `jail_calls`
behind it: inside there is no file of the package.
"""

import json
import os
import resource
import sys

IS_SET_UP = b"\x01"
MOST_DESCRIPTORS = 1 << 20


def limit(kind: int, wanted: int) -> None:
    """Limit this process for good, a grader's too; no limit that it has is raised."""
    _, hard = resource.getrlimit(kind)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (most, most))


def take_orders() -> tuple[dict, str]:  # no `typing`: a run is milliseconds
    """Limit this process, tell so on standard error, and return the orders and the code.

    Root becomes another user before, whom alone the kernel holds to a number of processes. Of the
    descriptors none stays but the standard ones and the peer's.
    """
    orders = json.loads(sys.argv[1])
    with open(orders["code"], encoding="utf-8", errors="surrogatepass", newline="") as file:
        code = file.read()
    if orders["user"]:
        os.setgroups([])
        os.setgid(orders["user"])
        os.setuid(orders["user"])
    for kind, wanted in orders["limits"]:
        limit(kind, wanted)
    os.write(2, IS_SET_UP)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    peer = orders["peer"] or 2
    os.closerange(3, peer)
    os.closerange(peer + 1, MOST_DESCRIPTORS)
    return orders, code


def become_program() -> None:
    """Run the code as a program; standard input is its own."""
    _, code = take_orders()
    try:
        exec(compile(code, "program", "exec"), {"__name__": "__main__"})
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
