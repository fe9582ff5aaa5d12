"""A process that begins before its work is known does the first piece, and no other."""

import multiprocessing
import os
import subprocess
import time
import types

import psutil
import pytest

from async_grpo.rollout.early_process import EarlyProcess, program
from async_grpo.rollout.generation_worker import worker_environment

TIMEOUT_S = 60
WORKER = """
import os, sys, time
from async_grpo.rollout import early_process
print(early_process.begun._process.pid, "vllm" in sys.modules, file=open(sys.argv[1] + ".new", "w"))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


def answer(queue, tensor_queue=None):
    """In the process: who it is, and one of its variables."""
    queue.send((os.getpid(), os.environ["GIVEN_LATE"]))


@pytest.fixture
def vllm():
    """Instead of vLLM's module that makes processes."""
    utils = types.ModuleType("utils")
    utils.get_mp_context = lambda: multiprocessing.get_context("spawn")
    return utils


def asked(vllm, **arguments):
    """What a process that is made as vLLM makes it has answered, and the process."""
    here, there = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = vllm.get_mp_context().Process(
        target=answer, name="EngineCore", kwargs={"queue": there} | arguments
    )
    process.start()
    assert here.poll(TIMEOUT_S)
    said = here.recv()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0
    return said, process


def test_the_first_engine_runs_in_it_with_the_variables_of_then_and_a_second_as_usual(
    vllm, monkeypatch
):
    early = EarlyProcess()
    pid = early._process.pid
    early.give_to(vllm)
    monkeypatch.setenv("GIVEN_LATE", "yes")
    said, process = asked(vllm)
    assert said == (pid, "yes") and process.pid == pid
    (second, _), _ = asked(vllm)
    assert second != pid


def test_it_ends_when_its_worker_has_no_work_for_it(vllm):
    early = EarlyProcess()
    process = early._process
    early._here.close()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0


def test_what_ray_starts_has_imported_vllm_and_its_fork_ends_when_it_is_killed(tmp_path):
    script, told = tmp_path / "worker.py", tmp_path / "told"
    script.write_text(WORKER)
    # As Ray does it.
    command = ["bash", "-c", f'exec {program()} "$0" "$1"', script, told]
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | worker_environment()) as worker:
        until(told.exists)
        pid, has_imported = told.read_text().split()
        engine = psutil.Process(int(pid))
        assert has_imported == "True" and engine.ppid() == worker.pid
        worker.kill()
    until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


def until(holds):
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
