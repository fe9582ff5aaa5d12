"""A child of a command ends with it, however the command ends."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from async_grpo.launch.child_processes import leash

PARENT = """
import os, sys, time
from pathlib import Path
from async_grpo.launch.child_processes import ChildProcess
child = ChildProcess("the child", [sys.executable, "-c", "import time; time.sleep(100)"],
                log=Path(sys.argv[1]), environment=dict(os.environ))
with child:
    print(child.child.pid, flush=True)
    time.sleep(100)
"""


@pytest.mark.skipif(not leash(signal.SIGINT), reason="needs util-linux's setpriv")
def test_a_child_ends_when_its_command_is_killed(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, tmp_path / "log"], stdout=subprocess.PIPE, text=True
    )
    child = psutil.Process(int(parent.stdout.readline()))
    while "sleep" not in " ".join(child.cmdline()[:3]):  # setpriv has become the command
        time.sleep(0.05)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    child.wait(10)


def test_a_thread_that_may_end_leashes_nobody():
    found = []
    thread = threading.Thread(target=lambda: found.append(leash(signal.SIGTERM)))
    thread.start()
    thread.join()
    assert found == [()]
