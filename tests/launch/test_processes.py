"""How a child's end is told: by its signal or code, and by what its log names as the cause."""

import os
import sys
import time
from contextlib import nullcontext

import pytest

from async_grpo.launch.child_processes import ChildProcess
from async_grpo.util.errors import AsyncGrpoError, WorkerError

NOISE = "print('INFO worker verifier-1 is ready after 0.5 s'); "


def ended(code, folder, **options):
    log = folder / "it.log"
    command = [sys.executable, "-c", f"import os, sys, signal\n{code}"]
    child = ChildProcess(
        "the generation worker", command, log=log, environment=os.environ, **options
    )
    with child:
        child.child.wait(timeout=30)
        with pytest.raises(WorkerError) as error:
            child.check()
    return str(error.value).replace(f" (all of it in {log})", "")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("sys.exit('error: no room')", "failed with exit code 1: no room"),
        ("raise OSError('disk')", "failed with exit code 1: OSError: disk"),
        ("print('it is over'); sys.exit(0)", "ended early: it is over"),
        ("sys.exit(7)", "failed with exit code 7"),
    ],
)
def test_the_cause_is_told_and_no_line_of_progress(code, said, tmp_path):
    assert ended(f"{NOISE}{code}", tmp_path) == f"the generation worker {said}"


@pytest.mark.parametrize("code", [0, 3])
def test_one_that_may_end_fails_by_its_code_alone(code, tmp_path):
    child = ChildProcess(
        "it", [sys.executable, "-c", f"raise SystemExit({code})"], log=tmp_path / "it.log",
        environment=os.environ, may_end=True,
    )  # fmt: skip
    with child:
        child.child.wait(timeout=30)
        with pytest.raises(WorkerError, match="exit code 3") if code else nullcontext():
            child.check()


def test_a_log_is_kept_over_restarts_and_whoever_fails_by_itself_is_not_started_again(
    tmp_path, caplog
):
    (tmp_path / "runs").touch()
    code = f"""
with open({str(tmp_path / "runs")!r}, "a") as file:
    file.write("x")
print("error: no luck" if os.path.getsize({str(tmp_path / "runs")!r}) > 2 else "alive", flush=True)
os.kill(os.getpid(), 9) if os.path.getsize({str(tmp_path / "runs")!r}) <= 2 else sys.exit(1)
"""
    log = tmp_path / "it.log"
    command = [sys.executable, "-c", code.replace("\nwith", "import os, sys\nwith", 1)]
    child = ChildProcess("it", command, log=log, environment=os.environ, max_restarts=5)
    deadline = time.monotonic() + 60
    with child, pytest.raises(WorkerError, match="it failed with exit code 1: no luck"):
        while time.monotonic() < deadline:
            child.check()
            time.sleep(0.05)
    assert log.read_text().split() == ["alive", "alive", "error:", "no", "luck"]
    assert ["started again" in message for message in caplog.messages] == [True, True]


RAY = """
print('''INFO node.py:349 -- starting
Traceback (most recent call last):
    node = ray._private.node.Node(
           ^^^^^^^^^^^^^^^^^^^^^^^
Exception: The current node timed out during startup.''', flush=True)
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("sys.exit(1)", "failed with exit code 1: Exception: The current node timed out during"),
        (
            "import time; time.sleep(60)",
            "must be ready within 3 s, it was not: is the machine busy",
        ),
    ],
)
def test_a_ray_that_does_not_start_is_one_sentence(code, said, tmp_path):
    command = [sys.executable, "-c", f"import sys\n{RAY}{code}"]
    head = ChildProcess("the Ray head", command, log=tmp_path / "ray.log", environment=os.environ)
    with head, pytest.raises(AsyncGrpoError) as error:
        head.wait_for("Ray runtime started", timeout_s=3)
    assert str(error.value).startswith(f"the Ray head {said}") and "^^^" not in str(error.value)
