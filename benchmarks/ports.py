"""Who listens while a quick start runs, and who of them answers from outside this machine.

    python -m benchmarks.ports

Starts a short quick start, waits until it trains, finds every listening socket of its processes in
/proc, and connects to each port at the machine's own address instead of the loopback one; Ray's
ports are also asked for the cluster's id without a token.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from async_grpo.cli.interrupts import interrupt_once
from benchmarks import procfs, results

READY_TIMEOUT_S = 400.0
CONNECT_TIMEOUT_S = 3.0
LISTENING = "0A"
# One question of each of Ray's services that changes nothing.
QUESTIONS = (
    "NodeInfoGcsService/GetClusterId",
    "CoreWorkerService/NumPendingTasks",
    "NodeManagerService/GetNodeStats",
    "RayletDriver/KVList",  # the Ray client's server
    "ReporterService/GetTraceback",
    "ObjectManagerService/Pull",
)
NOT_SPOKEN = ("UNIMPLEMENTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN", "INTERNAL")
QUICKSTART = (
    "-c",
    "from async_grpo.cli.main import main; main()",
    "quickstart",
    "--num-batches",
    "1000",
)


@dataclass(frozen=True, slots=True)
class Port:
    """One listening socket, and what became of talking to it."""

    process: str
    port: int
    bound_to: str  # an address, or "*" for every interface
    outside: str  # what the machine's other address answers: refused, open, another (process does)
    without_token: str  # what Ray's protocol gets there: its status, or nothing


def main() -> None:
    """Print and record every listening port."""
    interrupt_once()  # so that SIGTERM too ends what was started
    with tempfile.TemporaryDirectory() as folder, _quickstart(Path(folder) / "run") as leader:
        ports = scan(_family(leader), outside=outside_address())
    ports = sorted(ports, key=lambda port: (port.bound_to, port.process, port.port))
    rows = [list(map(str, asdict(port).values())) for port in ports]
    print(results.table(("process", "port", "bound to", "from outside", "without a token"), rows))
    refusing = count(ports, without_token="UNAUTHENTICATED")
    speaking = len(ports) - count(ports, without_token="")
    figures = [
        results.Figure("listening", len(ports), "ports"),
        results.Figure("on every interface", count(ports, bound_to="*"), "ports", goal=0),
        results.Figure("open from outside", count(ports, outside="open"), "ports", goal=0),
        results.Figure("of Ray, wanting a token", refusing, "ports", better="higher"),
        results.Figure("of Ray, wanting none", speaking - refusing, "ports", goal=0),
    ]
    print("\n" + results.show(figures))
    print(f"\nwritten to {results.write('ports', figures)}")


def count(ports: list[Port], **wanted: str) -> int:
    """How many ports are all of that.

    >>> ports = [Port("a", 1, "*", "open", ""), Port("b", 2, "127.0.0.1", "refused", "")]
    >>> count(ports, bound_to="*"), count(ports)
    (1, 2)
    """
    return sum(all(getattr(port, k) == v for k, v in wanted.items()) for port in ports)


def scan(pids: set[int], *, outside: str) -> list[Port]:
    """Every listening socket of these processes; one that several have counts once."""
    found: dict[tuple[str, int], Port] = {}
    table = listening_sockets()
    for pid in sorted(pids):
        for inode in _sockets_of(pid):
            if inode in table:
                address, port = table[inode]
                taken = {(outside, port), ("*", port)} & (set(table.values()) - {table[inode]})
                seen = _examine(_name(pid), address, port, outside)
                if taken and seen.outside == "open" and address not in ("*", outside):
                    seen = replace(seen, outside="another")  # whose port has the same number
                found.setdefault(table[inode], seen)
    return list(found.values())


def listening_sockets() -> dict[str, tuple[str, int]]:
    """Address ("*" for all) and port by inode, of IPv4 and IPv6."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING:
                address, _, port = fields[1].partition(":")
                sockets[fields[9]] = (address_of(address), int(port, 16))
    return sockets


def address_of(hexadecimal: str) -> str:
    """As /proc/net/tcp writes it: words of 32 bits in the machine's byte order.

    >>> address_of("0100007F"), address_of("00000000"), address_of("0" * 32)
    ('127.0.0.1', '*', '*')
    >>> address_of("0000000000000000FFFF00000100007F"), address_of("0" * 24 + "01000000")
    ('127.0.0.1', '::1')
    """
    words = [hexadecimal[at : at + 8] for at in range(0, len(hexadecimal), 8)]
    raw = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    if not any(raw):
        return "*"
    if raw[:12] == bytes(10) + b"\xff\xff":
        raw = raw[12:]
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def outside_address() -> str:
    """This machine's address on its network; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        address: str = probe.getsockname()[0]
    if address.startswith("127."):
        raise SystemExit("this machine has no address but the loopback one: nothing to scan from")
    return address


def _examine(process: str, address: str, port: int, outside: str) -> Port:
    here = "127.0.0.1" if address == "*" else address
    return Port(process, port, address, _connect(outside, port), _ask_ray(here, port))


def _connect(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return "refused" if isinstance(error, ConnectionRefusedError) else str(error)
    return "open"


def _ask_ray(host: str, port: int) -> str:
    """The status of a call without a token; empty where none of Ray's services answers."""
    import grpc

    with grpc.insecure_channel(f"{host}:{port}") as channel:
        for question in QUESTIONS:
            try:
                channel.unary_unary(f"/ray.rpc.{question}")(b"", timeout=CONNECT_TIMEOUT_S)
            except grpc.RpcError as error:
                if (status := error.code().name) not in NOT_SPOKEN:
                    return status
                if status != "UNIMPLEMENTED":
                    return ""  # nobody speaks gRPC here
            else:
                return "OK"
    return ""


def _family(leader: int) -> set[int]:
    """A process and everything that descends from it."""
    table, family = dict(procfs.processes()), {leader}
    while more := {pid for pid, (parent, _) in table.items() if parent in family} - family:
        family |= more
    return family


def _sockets_of(pid: int) -> Iterator[str]:
    with contextlib.suppress(*procfs.GONE):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(*procfs.GONE):
                target = os.readlink(f"/proc/{pid}/fd/{entry}")
                if target.startswith("socket:["):
                    yield target.removeprefix("socket:[").removesuffix("]")


def _name(pid: int) -> str:
    with contextlib.suppress(*procfs.GONE):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        names = [Path(word).name for word in words if word and not word.startswith("-")]
        interesting = [name for name in names[:3] if not name.startswith("python")]
        return (interesting or names or ["?"])[0][:40]
    return "ended"


@contextlib.contextmanager
def _quickstart(folder: Path) -> Iterator[int]:
    """The process id of a quick start that trains."""
    with tempfile.TemporaryFile("w+") as screen:
        child = subprocess.Popen(
            [sys.executable, *QUICKSTART, "--output-dir", str(folder)],
            stdout=screen, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            _wait_for_training(child, folder, screen)
            yield child.pid
        finally:
            child.send_signal(signal.SIGINT)
            child.wait(60)


def _wait_for_training(child: subprocess.Popen[bytes], folder: Path, screen: object) -> None:
    metrics, deadline = folder / "training_metrics.jsonl", time.monotonic() + READY_TIMEOUT_S
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) >= 2):
        if child.poll() is not None or time.monotonic() > deadline:
            screen.seek(0)  # type: ignore[attr-defined]
            raise SystemExit(f"the quick start does not train:\n{screen.read()}")  # type: ignore[attr-defined]
        time.sleep(1.0)


if __name__ == "__main__":
    main()
