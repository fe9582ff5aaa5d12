"""Generated programs that fight back: what they reach, and whether they can pass unearned."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from no_namespaces import REFUSAL, refusing_bwrap
from verifier_processes import Grader, all_below, are_gone

from async_grpo.verification import jailer
from async_grpo.verification.graders.code_execution import grade_code

pytestmark = pytest.mark.integration

LONG_S = 60.0  # nothing that should end takes as long, however busy the machine


@pytest.fixture(autouse=True)
def jail():
    if jailer.what_is_missing():
        pytest.skip(f"this system allows no jail: {jailer.what_is_missing()}")


def run(code, given=b"", *, within_s=LONG_S, cpu_s=20):
    return jailer.run_program(
        code,
        given,
        deadline=time.monotonic() + within_s,
        cpu_s=cpu_s,
    )


def grade(program, **columns):
    return grade_code(f"Here:\n```python\n{program}\n```", columns, budget_s=LONG_S)


def test_a_program_is_graded_by_its_output_alone():
    tests = [{"input": "3\n4\n", "output": "7\n"}, {"input": "1\n1\n", "output": "2"}]
    assert grade("print(int(input()) + int(input()))", tests=tests) == 1.0
    assert grade("print(7)", tests=tests) == 0.0
    assert grade("import sys; print(7); sys.exit(3)", tests=tests[:1]) == 0.0
    assert grade("print(7); raise SystemExit", tests=tests[:1]) == 1.0
    assert grade("print(7", tests=tests[:1]) == 0.0


def test_functions_are_graded_by_what_they_return():
    tests = [
        "assert f(2) == 4",
        "assert f([1, 2]) == [1, 2, 1, 2]",
        "assert set(f((1,))) == {1}",
        "assert math.isclose(f(1.25), 2.5)",
        "assert [f(x) for x in range(3)] == [0, 2, 4]",
    ]
    assert grade("def f(x): return x * 2", test_list=tests) == 1.0
    assert grade("def f(x): return x + 2", test_list=tests) == 0.0
    classes = ["s = Stack(); s.push(3); s.push('a')\nassert s.pop() == 'a' and s.pop() == 3"]
    stack = "class Stack(list):\n    def push(self, x): self.append(x)"
    assert grade(stack.replace("(list)", ""), test_list=classes) == 0.0
    assert (
        grade(
            "class Stack:\n    def __init__(s): s.l = []\n    def push(s, x): s.l.append(x)\n"
            "    def pop(s): return s.l.pop()",
            test_list=classes,
        )
        == 1.0
    )
    assert grade("def g(x): return x > 1", test="def check(c):\n    assert c(2) and not c(1)",
                 entry_point="g") == 1.0  # fmt: skip


EQUAL_TO_ALL = """
class E(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
    def __bool__(self): return True
def f(*a): return E()
"""
FRAMES = """
import gc, sys
def found(values):
    for value in values:
        if type(value) is int and 123456780 < value < 123456799: return value
        if isinstance(value, str) and "assert f" in value: return int(value.split()[-1])
def f(*a):
    frame = sys._getframe()
    while frame:
        value = found([*frame.f_locals.values(), *frame.f_globals.values()])
        if value: return value
        frame = frame.f_back
    for value in gc.get_objects():
        if isinstance(value, (list, tuple)) and found(value): return found(value)
"""
ON_DISK = """
import os
def f(*a):
    for folder in ("/", "/tmp", "/dev", "/old", "/proc"):
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            try: text = open(os.path.join(folder, name), "rb").read(1 << 20)
            except OSError: continue
            if b"23456789" in text: return 123456780 + 9
"""
FORGED_WORD = """
import os
for descriptor in range(64):
    try: os.write(descriptor, b"passed test 1")
    except OSError: pass
os._exit(0)
"""
FORGED_FRAME = """
import os, json
body = json.dumps({"value": 1, "passed": True}).encode()
for descriptor in range(3, 64):
    try: os.write(descriptor, body + b"\n")
    except OSError: pass
def f(*a): return 0
"""


@pytest.mark.parametrize(
    "program",
    [
        EQUAL_TO_ALL,
        FRAMES,
        ON_DISK,
        FORGED_WORD,
        FORGED_FRAME,
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('PASS'); print('passed'); print('All tests passed')",
        "import builtins\nbuiltins.AssertionError = Exception\ndef f(*a): return None",
        "import builtins\nbuiltins.abs = lambda x: 0\nabs = set = len = builtins.abs\n"
        "def f(*a): return 5",
        "def f(*a): raise AssertionError('passed')",
        "def f(*a): raise SystemExit(0)",
        "def f(*a):\n    import os; os._exit(0)",
        "def f(*a): return [[]] * 10**5",
        "def f(*a): return '9' * 10**8",
        "x = []\nfor _ in range(10**5): x = [x]\ndef f(*a): return x",
        "import atexit, os\natexit.register(lambda: os.write(1, b'passed'))",
        "import sys\nsys.modules['builtins'].__dict__['print'] = None\ndef f(*a): return a",
    ],
)
def test_a_pass_is_never_had_for_nothing(program):
    tests = ["assert f(1) == 123456789", "assert abs(f(2) - 123456789) < 1e-6"]
    assert grade(program, test_list=tests) == 0.0
    assert grade(program, tests=[{"input": "", "output": "123456789"}]) == 0.0


def test_nothing_of_this_machine_is_reached(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "hush")
    secret = tmp_path / "auth_token"
    secret.write_text("hush")
    listener = socket.create_server(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    abstract.bind(f"\0async-grpo-{os.getpid()}")
    abstract.listen()
    reached = run(f"""
import os, socket
def tried(what):
    try: return what() or "yes"
    except Exception as error: return ""
def connect(family, address):
    socket.socket(family).connect(address)
print(tried(lambda: connect(socket.AF_INET, {listener.getsockname()!r})))
print(tried(lambda: connect(socket.AF_UNIX, "\\0async-grpo-{os.getpid()}")))
print(tried(lambda: socket.getaddrinfo("example.com", 80)))
print(tried(lambda: open({str(secret)!r}).read()))
print(tried(lambda: open("/proc/1/environ").read()))
print(tried(lambda: open("/etc/passwd").read()))
print(tried(lambda: open("{Path.home()}/.ray/auth_token").read()))
print(tried(lambda: os.listdir({os.getcwd()!r})))
print(tried(lambda: [][not "hush" in str(os.environ)]))
print(tried(lambda: open("/x", "w")))
print(tried(lambda: open(os.__file__, "a")))
print(tried(lambda: os.listdir("/old")[0]))
print(tried(lambda: os.execv("/bin/sh", ["sh", "-c", "true"])))
print("".join(tried(lambda: str(os.fstat(fd))) for fd in range(3, 64)))
""")
    assert reached.ending == "ended"
    assert reached.output.decode().split("\n") == [""] * 15
    assert run("open('/tmp/mine', 'w').write('x'); print(open('mine').read())").output == b"x\n"


def test_nobody_outside_is_signalled_and_nothing_stays():
    before = all_below(os.getpid())
    code = """
import os, signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        import time; time.sleep(1000)
    os._exit(0)
try: os.kill(-1, signal.SIGKILL)
except ProcessLookupError: pass
print(os.getpid(), os.getppid())
"""
    assert run(code).output in (b"1 0\n", b"2 1\n")  # as root below bwrap's init
    assert all_below(os.getpid()) == before


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("while True: pass", "failed"),  # the processor time is up
        ("while True: print('x' * 10_000)", "failed"),
        ("x = bytearray(3 << 30)", "failed"),
        ("open('big', 'wb').write(bytes(64 << 20))", "failed"),
        ("import os\nfor n in range(100): open(f'{n}', 'wb').write(bytes(1 << 20))", "failed"),
        ("files = [open('/dev/null') for _ in range(100)]", "failed"),
        ("import ctypes; ctypes.string_at(0)", "failed"),
        ("def f(): f()\nf()", "failed"),
        ("import socket; s = socket.socket(); s.bind(('127.0.0.1', 80)); s.connect(('8.8.8.8', 1))",
         "failed"),
    ],
)  # fmt: skip
def test_every_bomb_ends_at_its_limit(code, ending):
    assert run(code, cpu_s=1).ending == ending


def test_the_kernel_holds_each_of_several_programs_to_its_own_number_of_processes():
    code = """
import os, time
for number in range(400):
    try:
        if os.fork() == 0: time.sleep(600)
    except BlockingIOError:
        time.sleep(1)  # while the others fork
        print(number)
        break
"""
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(run, [code] * 3))
    assert [result.output for result in results] == [b"%d\n" % (jailer.PROCESSES - 1)] * 3


def test_a_program_of_roots_cannot_become_root_again():
    code = """
import os
def tried(what):
    try: what()
    except OSError: return "no"
print(os.getuid() == os.geteuid() > 0 < os.getgid(), tried(lambda: os.setuid(0)),
      tried(lambda: os.setgid(0)), len(os.getgroups()))
"""
    assert run(code).output.startswith(b"True no no ")


def test_a_program_ends_with_the_process_that_runs_it():
    program = "import os, time; os.fork(); time.sleep(600)"
    script = f"""
import time
from async_grpo.verification import jailer
jailer.run_program({program!r}, b"", deadline=time.monotonic() + 600, cpu_s=100)
"""
    num = 3 if jailer._users() is None else 4  # bwrap, its init of root's, the program, its child
    verifier = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + LONG_S
    while len(left := all_below(verifier.pid)) < num and time.monotonic() < deadline:
        time.sleep(0.02)
    verifier.kill()
    verifier.wait()
    assert len(left) == num
    assert are_gone(left)


@pytest.mark.parametrize(
    "code", ["import time; time.sleep(1000)", "import os; os.close(1)\nwhile 1: 0"]
)
def test_a_program_that_waits_ends_at_the_deadline(code):
    started = time.monotonic()
    with_time = {"within_s": 1.5, "cpu_s": 100}
    assert run(code, **with_time).ending == "too slow"
    assert time.monotonic() - started < LONG_S


def test_input_that_is_not_read_and_output_before_it_do_no_harm():
    assert run("print('x' * 1_000_000)", b"y" * 5_000_000).output == b"x" * 1_000_000 + b"\n"
    assert run("import sys; print(len(sys.stdin.read()))", b"y" * 5_000_000).output == b"5000000\n"


def test_a_test_that_passes_an_object_of_its_own_is_told_of():
    with pytest.raises(ValueError, match="a Pair cannot be an argument"):
        grade("def f(x): return x", test_list=["assert f(Pair())"], test_setup_code="class Pair: 0")


def test_a_builtin_is_the_programs_only_where_the_question_asks_for_it():
    tests = ["assert sum(2, 3) == 5"]
    program = "def sum(a, b): return a + b"
    assert grade(program, test_list=tests, code=program) == 1.0
    assert grade(program, test_list=tests) == 0.0


REFUSED = """
import time
from async_grpo.util.errors import ConfigError
from async_grpo.verification import jailer
try:
    jailer.require_jail()
except ConfigError as error:
    print(error)
print(jailer.allow_unconfined())
jailer.require_jail()
code = "import os; print(os.path.exists('/proc/self'))"
print(jailer.run_program(code, b"", deadline=time.monotonic() + 60, cpu_s=20).output)
"""


def test_without_a_jail_generated_code_is_refused_unless_the_user_does_without(tmp_path):
    path = f"{refusing_bwrap(tmp_path)}:{os.environ['PATH']}"
    said = subprocess.check_output(
        [sys.executable, "-c", REFUSED], env=os.environ | {"PATH": path}, text=True
    )
    refusal, allowed, output = said.splitlines()
    assert f"does not allow ({REFUSAL}):" in refusal and "with --unconfined-code that" in refusal
    assert allowed == str({"programs of the model": REFUSAL})
    assert output == repr(b"True\n")


def test_the_adapter_grades_inside_the_sandbox():
    grader = Grader("code_execution", timeout_s=60.0)
    tests = [{"input": "2\n", "output": "4\n"}]
    good, bad, none, bomb = grader.grade(
        {"output": "```python\nprint(int(input()) * 2)\n```", "tests": tests},
        {"output": "```python\nprint(5)\n```", "tests": tests},
        {"output": "print(4)", "tests": tests},
        {"output": "```python\nimport os\nwhile True: os.fork()\n```", "tests": tests},
    )
    again = grader.grade({"output": "```python\nprint(4)\n```", "tests": tests})
    grader.close()
    assert [(v.status, v.reward) for v in (good, bad, none)] == [
        ("scored", 1.0), ("scored", 0.0), ("unscorable", 0.0)
    ]  # fmt: skip
    assert bomb.reward == 0.0
    assert again.reward == 1.0
