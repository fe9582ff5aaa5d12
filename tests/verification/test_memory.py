"""The limit on memory is one of a whole program: of its processes and files, counted once."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verifier_processes import sandbox

from async_grpo.environments.tools.code import PythonTool
from async_grpo.verification import jailer
from async_grpo.verification.usage import LONGEST_S, SHARE, descendants, held_mib, pause_s

LIMIT_MIB = 160  # of a jail here: cheaper than a GiB
CHILDREN = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        held = bytearray(b"x") * (50 << 20)
        time.sleep(60)
time.sleep(60)
"""
SHARED = """
import os, time
held = bytearray(b"x") * (60 << 20)
for _ in range(8):
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
time.sleep(1)
print("all in time")
"""


@pytest.fixture
def small_jail(monkeypatch):
    monkeypatch.setattr(jailer, "MEMORY_MIB", LIMIT_MIB)
    if jailer.what_is_missing():
        pytest.skip(f"this system allows no jail: {jailer.what_is_missing()}")


def run(code):
    return jailer.run_program(code, b"", deadline=time.monotonic() + 60, cpu_s=20)


@pytest.mark.integration
def test_a_program_is_stopped_for_what_its_processes_hold_together(small_jail):
    assert run(CHILDREN).ending == "too large"


@pytest.mark.integration
def test_a_program_is_not_stopped_for_what_its_processes_share(small_jail):
    result = run(SHARED)
    assert (result.ending, result.output) == ("ended", b"all in time\n")


@pytest.mark.integration
def test_tests_end_with_a_solution_that_holds_too_much(small_jail):
    result = jailer.run_tests(
        f"def f():\n{CHILDREN}".replace("\n", "\n    "),
        ["f()"],
        setup="",
        defines=["f"],
        deadline=time.monotonic() + 60,
        cpu_s=20,
    )
    assert result.ending == "too large"


@pytest.mark.integration
def test_a_model_reads_that_its_program_held_too_much(small_jail):
    tool = PythonTool(max_seconds=30.0)
    said = asyncio.run(tool.call({"code": CHILDREN}))
    assert said == "[the program was stopped: it held more than 1024 MiB]"


GREEDY = """
import os, subprocess, sys, time

def greedy(sample):
    if sample["kind"] == "children":
        code = "import time; held = bytearray(b'x') * (120 << 20); time.sleep(60)"
        for _ in range(5):
            subprocess.Popen([sys.executable, "-c", code])
        time.sleep(60)
    if sample["kind"] == "files":
        for _ in range(4):
            os.write(os.memfd_create("x"), bytes(130 << 20))
        time.sleep(60)
    return 1.0
"""


@pytest.mark.integration
def test_a_reward_is_held_to_what_its_processes_and_files_hold_together(tmp_path):
    path = tmp_path / "greedy.py"
    path.write_text(GREEDY)

    async def grade():
        async with sandbox(f"{path}:greedy", memory_mib=500, timeout_s=10.0) as box:
            await box.grade([{"kind": "fine"}])
            kinds = ("children", "files")
            return await asyncio.gather(*(box.grade([{"kind": kind}]) for kind in kinds))

    for (verdict,) in asyncio.run(grade()):
        assert (verdict.status, verdict.reward, verdict.cause) == ("unscorable", 0.0, "overrun")
        assert "--verifier-memory-mib 500" in verdict.reason


@contextmanager
def family(code):
    """The processes of a program that has run `code` and waits."""
    command = [sys.executable, "-c", f"{code}\nprint(flush=True)\ninput()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        found = [process.pid, *descendants(process.pid)]
        yield found
        for each in found:
            os.kill(each, signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "mib"),
    [
        ("x = bytearray(b'x') * (40 << 20)", 40),
        ("import os\nf = os.memfd_create('x')\nos.write(f, bytes(40 << 20))", 40),
        # One file of two processes, which neither has mapped.
        ("import os\nf = os.memfd_create('x')\nos.write(f, bytes(40 << 20))\n"
         "if os.fork() == 0: import time; time.sleep(60)", 40),
        ("import mmap\nm = mmap.mmap(-1, 40 << 20)\nm.write(bytes(40 << 20))", 40),
        ("import os\nx = bytearray(b'x') * (40 << 20)\n"
         "if os.fork() == 0: import time; time.sleep(60)", 40),
    ],
)  # fmt: skip
def test_memory_is_counted_once_wherever_it_lies(code, mib):
    with family("") as idle, family(code) as busy:
        held = held_mib(busy, limit_mib=0) - held_mib(idle, limit_mib=0)
    assert mib - 1 <= held <= mib + 12  # a fork copies some of an interpreter
    assert held_mib([busy[0]], limit_mib=0) == 0.0  # it has ended


def test_a_count_within_the_limit_is_no_exact_one():
    code = "import os\nx = bytearray(b'x') * (40 << 20)\nif os.fork() == 0: input()"
    with family(code) as both:
        assert held_mib(both, limit_mib=1000) > 80 > 60 > held_mib(both, limit_mib=50)


@given(room_mib=st.floats(-1e4, 1e6), looked_s=st.floats(0.0, 1.0))
def test_what_grows_fast_is_looked_at_in_time_and_looking_stays_cheap(room_mib, looked_s):
    pause = pause_s(room_mib=room_mib, looked_s=looked_s)
    assert looked_s <= SHARE * pause * 1.0001 or pause == LONGEST_S
    assert 0 < pause <= LONGEST_S
    if looked_s < 0.002:
        assert pause * 2048 <= max(room_mib, 0) / 2 + 21
