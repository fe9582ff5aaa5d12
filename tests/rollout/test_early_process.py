"""A process that begins before its work is known does the first piece, and no other."""

import multiprocessing
import os
import types

import pytest

from async_grpo.rollout.early_process import EarlyProcess

TIMEOUT_S = 60


def nothing():
    pass


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
    early = EarlyProcess(nothing)
    pid = early._process.pid
    early.give_to(vllm)
    monkeypatch.setenv("GIVEN_LATE", "yes")
    said, process = asked(vllm)
    assert said == (pid, "yes") and process.pid == pid
    (second, _), _ = asked(vllm)
    assert second != pid


def test_it_ends_when_its_worker_has_no_work_for_it(vllm):
    early = EarlyProcess(nothing)
    process = early._process
    early._here.close()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0
