"""A command on another node of a cluster: its end is seen, and it ends with who started it."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from local_ray import local_ray

from async_grpo.cluster.cluster import Cluster
from async_grpo.launch.child_processes import ChildProcess, RemoteProcess
from async_grpo.util.errors import WorkerError

SECRET = "hf_of_nobody"
pytestmark = pytest.mark.integration
WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # as a dispatcher has one, too
try:
    print(os.environ["GIVEN"], os.getcwd(), flush=True)
    with open("started", "w") as started:
        started.write(str(os.getpid()))
    time.sleep(600)
except KeyboardInterrupt:
    print("error: interrupted", flush=True)
    sys.exit(3)
"""


@pytest.fixture(scope="module")
def connected():
    with local_ray(num_cpus=1) as ray:
        yield ray


@pytest.fixture
def command(connected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [here] = Cluster().nodes_with_room()
    assert here.free["CPU"] == 1.0

    def start(text, **options):
        (tmp_path / "command.py").write_text(text)
        process = ChildProcess(
            "it", ["command.py"], log=tmp_path / "logs" / "it.log",
            environment={"GIVEN": "given", "HF_TOKEN": SECRET}, **options,
        )  # fmt: skip
        return RemoteProcess(process, node_id=here.node_id, reads=tmp_path / "command.py")

    return start


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pid_in(folder):
    file = folder / "started"
    wait_for(lambda: file.exists() and file.read_text())
    return int(file.read_text())


def test_it_works_in_our_folder_and_ends_with_the_block(command, tmp_path):
    with command(WAITS) as process:
        pid = pid_in(tmp_path)
        assert not process.has_ended
    wait_for(lambda: not is_alive(pid))
    said = (tmp_path / "logs" / "it.log").read_text()
    assert said.split() == ["given", str(tmp_path), "error:", "interrupted"]


def test_its_variables_stand_in_no_log_of_ray_s(command, connected, tmp_path):
    with command(WAITS):
        pid_in(tmp_path)
    logs = Path(connected._private.worker._global_node.get_logs_dir_path())
    texts = [file.read_bytes() for file in logs.rglob("*") if file.is_file()]
    assert any(b"CommandHost" in text for text in texts)
    assert not any(SECRET.encode() in text for text in texts)


def test_one_that_ends_by_itself_says_why(command):
    with command("print('error: no luck')\nraise SystemExit(1)") as process:
        wait_for(lambda: process.has_ended)
        assert "no luck (all of it in " in process.last_words


def test_one_that_is_killed_is_started_again_and_ends_with_the_block_all_the_same(
    command, tmp_path
):
    with command(WAITS, max_restarts=1) as process:
        first = pid_in(tmp_path)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: pid_in(tmp_path) != first)
        process.check()
        second = pid_in(tmp_path)
    wait_for(lambda: not is_alive(second))
    said = (tmp_path / "logs" / "it.log").read_text()
    assert said.split()[-2:] == ["error:", "interrupted"] and said.count("given") == 2


def test_one_that_is_killed_too_often_has_ended(command, tmp_path):
    with command("import os; os.kill(os.getpid(), 9)", max_restarts=2) as process:
        wait_for(lambda: process.has_ended)
        with pytest.raises(WorkerError, match=r"^it was killed by SIGKILL \(all of it in"):
            process.check()


def test_it_does_not_outlive_its_host(command, connected, tmp_path):
    with command(WAITS.replace("time.sleep(600)", "sys.stdin.read()")) as process:
        pid = pid_in(tmp_path)
        connected.kill(process._host)
        wait_for(lambda: not is_alive(pid))
        assert process.has_ended


def test_python_is_that_of_the_node(command):
    with command("import sys; print('error:', sys.executable); sys.exit(1)") as process:
        wait_for(lambda: process.has_ended)
        assert sys.executable in process.last_words
