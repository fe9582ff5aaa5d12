"""A child of a command ends with it, however the command ends."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from async_grpo.launch.child_processes import leash

PARENT = """
import os, sys, time
from pathlib import Path
from async_grpo.launch.child_processes import ChildProcess
sleeps = '''
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
print("ready", flush=True)
time.sleep(100)
'''
child = ChildProcess("the child", [sys.executable, "-c", sleeps],
                log=Path(sys.argv[1]), environment=dict(os.environ))
with child:
    print(child.child.pid, flush=True)
    time.sleep(100)
"""


def wait_until_ended(pid, *, within_s=10.0):
    """A zombie has ended: whoever inherits the orphan may look at it later, or never."""
    deadline = time.monotonic() + within_s
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.skipif(not leash(signal.SIGINT), reason="needs util-linux's setpriv")
def test_a_child_ends_when_its_command_is_killed(tmp_path):
    log = tmp_path / "log"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, log], stdout=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    while "ready" not in log.read_text():  # a Python that starts may swallow the signal
        time.sleep(0.05)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until_ended(child)


def test_a_thread_that_may_end_leashes_nobody():
    found = []
    thread = threading.Thread(target=lambda: found.append(leash(signal.SIGTERM)))
    thread.start()
    thread.join()
    assert found == [()]
