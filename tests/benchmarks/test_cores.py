import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cores import cpu_seconds, end, family, pin, pinned, queued_seconds, titled

SPIN = "while True: pass"
NAP = "import time; time.sleep(60)"


@pytest.fixture
def start():
    """Starts Python children that end with the test."""
    children = []

    def run(code):
        children.append(subprocess.Popen([sys.executable, "-c", code], start_new_session=True))
        return children[-1].pid

    yield run
    for child in children:
        child.kill()
        child.wait()


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_children_stay_on_the_core_and_the_parent_goes_back(start):
    before = os.sched_getaffinity(0)
    core = max(before)
    with pinned(core):
        child = start(NAP)
    assert os.sched_getaffinity(child) == {core}
    assert os.sched_getaffinity(0) == before


def test_running_processes_are_moved_with_all_their_threads(start):
    code = f"import threading; threading.Thread(target=lambda: exec({NAP!r})).start(); {NAP}"
    child, core = start(code), min(os.sched_getaffinity(0))
    wait_until(lambda: len(os.listdir(f"/proc/{child}/task")) == 2)
    pin({child}, core=core)
    for thread in os.listdir(f"/proc/{child}/task"):
        assert os.sched_getaffinity(int(thread)) == {core}


def test_a_family_holds_grandchildren_with_sessions_of_their_own(start):
    code = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', "
        f"{NAP!r}], start_new_session=True).wait()"
    )
    child, other = start(code), start(NAP)
    wait_until(lambda: len(family(child)) == 2)
    members = family(child)
    try:
        assert child in members and other not in members
        assert titled(members, sys.executable) == members
        assert not titled(members, "ray::")
    finally:
        end(members)
    # Itself a zombie of this process; its own child is left to init, which may take a moment.
    wait_until(lambda: family(child) <= {child})
    assert all(state(pid) in ("Z", "") for pid in members)


def test_what_computes_is_told_from_what_waits_for_a_core(start):
    with pinned(max(os.sched_getaffinity(0))):
        spinning, napping = [start(SPIN), start(SPIN)], start(NAP)
    wait_until(lambda: cpu_seconds(set(spinning)) > 1)
    assert cpu_seconds({napping}) < 0.5
    assert queued_seconds(set(spinning)) > 0.3  # two on one core: each waits for the other
