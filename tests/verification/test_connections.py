"""Rewards that wait: for a server that hangs, on whatever connection, in whatever process."""

import asyncio
import http.server
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from verifier_processes import sandbox

from async_grpo.verification.usage import cpu_seconds, hold_connection
from async_grpo.verification.verifier import cause_of

ADAPTERS = """
import asyncio, socket, subprocess, sys, time, urllib.request

def served(sample):
    return float(urllib.request.urlopen(sample["url"]).read())

def waits(sample):
    if sample["kind"] == "nap":
        time.sleep(60)
    if sample["kind"] == "loop":
        asyncio.run(asyncio.sleep(60))
    if sample["kind"] == "connection":
        return socket.create_connection(sample["address"]).recv(1)
    if sample["kind"] == "child":
        code = f"import socket; socket.create_connection({tuple(sample['address'])!r}).recv(1)"
        subprocess.run([sys.executable, "-c", code])
    return 1.0

def executes(sample):
    return waits(sample)

executes.executes_text = True
"""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    path = tmp_path_factory.mktemp("waiting") / "waiting.py"
    path.write_text(ADAPTERS)
    return str(path)


@contextmanager
def half_dead_server():
    """Answers 1.0 to every first of two requests, and never to the second."""
    asked, closing = [], threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            asked.append(self.path)
            if len(asked) % 2 == 0:
                closing.wait(60)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"1.0")

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        closing.set()
        server.shutdown()
        server.server_close()


@pytest.mark.integration
def test_no_sample_is_graded_0_by_a_server_that_hangs_now_and_then(adapters):
    async def grade():
        with half_dead_server() as (url, asked):
            async with sandbox(f"{adapters}:served", timeout_s=0.4) as box:
                verdicts = [
                    (await box.grade([{"url": f"{url}/{number}"}]))[0] for number in range(4)
                ]
                return verdicts, asked, box.events["retried"]

    verdicts, asked, num_retried = asyncio.run(grade())
    assert num_retried >= 2 and len(asked) > 4  # it did hang
    graded = [verdict for verdict in verdicts if verdict.status != "error"]
    assert graded and {verdict.reward for verdict in graded} == {1.0}
    assert {verdict.cause for verdict in verdicts if verdict.status == "error"} <= {"connection"}


@pytest.mark.integration
def test_an_overrun_is_an_error_where_it_waited_for_somebody_else_alone(adapters):
    waits, executes = f"{adapters}:waits", f"{adapters}:executes"
    cases = {
        (waits, "connection"): ("error", "connection"),
        (waits, "child"): ("error", "connection"),
        (waits, "nap"): ("unscorable", "overrun"),
        (waits, "loop"): ("unscorable", "overrun"),  # its own pair of sockets is no connection
        (executes, "connection"): ("unscorable", "overrun"),  # the text's own doing
    }

    async def grade():
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = silent.getsockname()
            async with sandbox(waits, executes, timeout_s=0.7, num_processes=8) as box:
                await box.grade([{"kind": "fine"}])
                samples = [({"kind": kind, "address": address}, name) for name, kind in cases]
                verdicts = await asyncio.gather(*(box.grade([s], [name]) for s, name in samples))
        return [(verdict.status, verdict.cause) for (verdict,) in verdicts]

    assert dict(zip(cases, asyncio.run(grade()), strict=True)) == cases


@contextmanager
def child(code):
    """A process that has run `code` and waits."""
    command = [sys.executable, "-c", f"{code}\nprint(flush=True)\ninput()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process.pid
        process.kill()


@pytest.mark.parametrize(
    ("code", "is_held"),
    [
        ("", False),
        ("import socket; s = socket.create_server(('127.0.0.1', 0))", False),  # none has come
        ("import socket; pair = socket.socketpair()", False),
        ("import os; pipe = os.pipe()", False),
        ("import socket; s = socket.socket(); s.connect(('127.0.0.1', {tcp}))", True),
        ("import socket; s = socket.socket(socket.AF_UNIX); s.connect({unix!r})", True),
        (
            "import socket; pair = socket.socketpair()\n"
            "one, two = (socket.socket(socket.AF_UNIX) for _ in 'ab')\n"
            "one.connect({unix!r}); two.connect({unix!r})",
            True,
        ),
        (
            "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            "s.connect(('127.0.0.1', {tcp}))",  # as who asks for a name's address
            True,
        ),
    ],
)
def test_a_connection_leads_to_a_process_that_is_none_of_them(code, is_held, tmp_path):
    path = str(tmp_path / "socket")
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(path)
        unix.listen()
        with child(code.format(tcp=tcp.getsockname()[1], unix=path)) as process:
            assert hold_connection([process]) == is_held
            assert hold_connection([]) is False


def test_processor_time_counts_what_children_have_used_and_use():
    before = cpu_seconds([os.getpid()])
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"])
    assert cpu_seconds([os.getpid()]) >= before + 0.2
    with child("import time\nwhile time.process_time() < 0.3: pass") as process:
        assert cpu_seconds([process]) >= 0.2
    assert cpu_seconds([process]) == 0.0


@pytest.mark.parametrize("library", ["httpx2", "httpcore2", "botocore", "grpc", "redis"])
def test_what_a_client_library_raises_is_a_connections_error_by_whom_it_was_raised_from(library):
    away = type("Away", (Exception,), {"__module__": f"{library}.errors"})
    told = ValueError("no grade")
    assert cause_of(told) == "exception"
    told.__cause__ = away()
    assert (cause_of(away()), cause_of(told)) == ("connection", "connection")
