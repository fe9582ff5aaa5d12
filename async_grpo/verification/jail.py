"""The program that runs generated code, in a confinement that holds Python's library alone.

Its memory holds the code, and no expected results, environment or descriptors of the verifier.
`jailer` passes the text of this file to `python -c`, as the confinement holds no file of the
package; for tests of functions, the text of `jail_calls` follows.
"""

import json
import os
import resource
import sys

IS_SET_UP = b"\x01"
MOST_DESCRIPTORS = 1 << 20


def limit(kind: int, wanted: int) -> None:
    """Set a hard limit of this process, a jail's or a grader's; an existing one is not raised."""
    _, hard = resource.getrlimit(kind)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (most, most))


def take_orders() -> tuple[dict, str]:  # without `typing`: its import would take a run's time
    """Limit this process, write `IS_SET_UP` to standard error, and return the orders and the code.

    Root first becomes another user, as the kernel does not limit root's number of processes. All
    descriptors are closed but the standard ones and the peer's.
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
    """Run the code as a program, which reads the standard input."""
    _, code = take_orders()
    try:
        exec(compile(code, "program", "exec"), {"__name__": "__main__"})
    except SystemExit as leaving:
        _flush_and_exit(leaving.code)
    except BaseException:  # the process boundary: any exception of the code is an exit code
        _flush_and_exit(1)
    _flush_and_exit(0)


def _flush_and_exit(code: object) -> None:
    try:
        sys.stdout.flush()
    finally:
        os._exit(code if isinstance(code, int) and 0 <= code < 256 else int(code is not None))
