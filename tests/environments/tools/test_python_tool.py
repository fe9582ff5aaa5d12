"""Programs of the model's in the jail: whatever they do, the model reads something soon."""

import asyncio
import time

import pytest

from async_grpo.environments.chat.messages import ToolCall
from async_grpo.environments.tools.code import PythonTool
from async_grpo.environments.tools.toolbox import Toolbox

pytestmark = pytest.mark.integration


def run(code, *, max_seconds=10.0):
    box = Toolbox([PythonTool(max_seconds=max_seconds)], max_characters=500)
    (result,) = asyncio.run(box.answer([ToolCall("run_python", {"code": code})]))
    return result.text


def test_what_a_program_prints_is_read():
    assert run("print(sum(range(5)))") == "10\n"


def test_what_a_program_raises_is_read_too():
    text = run("def f():\n    return 1/0\nf()")
    assert "ZeroDivisionError" in text and "[the program failed]" in text


@pytest.mark.parametrize(
    ("code", "read"),
    [
        ("x = 1", "[nothing was printed]"),
        ("import sys; sys.exit(3)", "[the program failed]"),
        ("import os; os._exit(0)", "[nothing was printed]"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "["),  # an init cannot
        ("x = 'a' * 10**10", "MemoryError"),
        ("def f(): f()\nf()", "RecursionError"),
        ("open('/etc/passwd').read()", "FileNotFoundError"),
        ("import socket; socket.create_connection(('1.1.1.1', 80), 1)", "OSError"),
        ("this is no program", "SyntaxError"),
        ("print('\\ud800')", "UnicodeEncodeError"),
    ],
)
def test_a_program_that_goes_wrong_is_something_that_the_model_reads(code, read):
    assert read in run(code)


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)"])
def test_a_program_that_hangs_is_stopped(code):
    started = time.monotonic()
    assert "stopped after 4 seconds" in run(code, max_seconds=4.0)
    assert time.monotonic() - started < 20


def test_a_program_that_floods_is_cut():
    assert run("while True: print('x' * 1000)").count("x") <= 500
