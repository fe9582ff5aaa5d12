"""Ctrl-C and SIGTERM, answered by a process of its own, in every state of its main thread."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event

import pytest

from async_grpo.launch.interrupts import Interrupted, RankInterrupts, where_to_go_on
from async_grpo.util.stopping import StopRequest, stop_in_order

REPOSITORY = Path(__file__).parents[2]
RANK = """
import contextlib, ctypes, os, signal, sys, threading, time
from async_grpo.util import deadlines
from async_grpo.launch import interrupts
from async_grpo.cli.boundary import command_boundary
from async_grpo.launch.local_ranks import end_with_agent, ends_at_once, is_main_rank
from async_grpo.util.stopping import StopRequest, polled

interrupts.SAME_REQUEST_S, deadlines.RANK_BREAK_OFF_S = {same_s}, 2.0
deadlines.RANK_GRACE_S = {grace_s}

def ready():
    print("ready", flush=True)

def blocked_in_c():
    for number in interrupts.NUMBERS:
        signal.siginterrupt(number, False)
    reader, _ = os.pipe()
    ready()
    ctypes.CDLL(None).read(reader, ctypes.create_string_buffer(1), 1)

def train():
    ready()
    while not stop.is_set():
        time.sleep(0.01)
    say("saved")

def load():
    try:
        ready()
        time.sleep(600)
    finally:
        print("released", flush=True)

def asked_through_another_thread():
    def ask():
        time.sleep(0.5)  # the main thread sleeps by then, and no signal of another wakes it
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    threading.Thread(target=ask).start()
    load()

def asked_by_a_neighbour():
    ready()
    stop.set()

stop = StopRequest()
def say(text):  # in one piece: two threads may speak
    os.write(1, text.encode() + bytes([10]))

answers = interrupts.RankInterrupts(stop, is_main=is_main_rank(), say=say)
answers.listen()
end_with_agent()
with ends_at_once(stop), command_boundary(), answers.on_interrupt({folder!r}):
    with polled(stop) if {is_polled} else contextlib.nullcontext():
        {state}()
"""


AGENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]]).wait()
"""


@contextlib.contextmanager
def rank(state, folder, *, number=0, is_polled=True, grace_s=30.0, same_s=60.0):
    """A process in that state; `same_s`: signals within it count as one."""
    values = {"grace_s": grace_s, "same_s": same_s, "folder": str(folder)}
    code = RANK.format(state=state, is_polled=is_polled, **values)
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=os.environ | {"RANK": str(number)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "ready\n", child.stderr.read()
        yield child
    finally:
        child.kill()
        child.communicate()


def end_of(child):
    """Exit code, output, last line of errors."""
    out, err = child.communicate(timeout=60)
    return child.returncode, out, err.splitlines()[-1] if err else ""


def wait_until_it_sleeps(pid):
    """Ten looks in a row; a process that is about to block is seen to run."""
    num_asleep = 0
    while num_asleep < 10:
        time.sleep(0.05)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        num_asleep = num_asleep + 1 if state == "S" else 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_rank_that_trains_ends_in_order_and_says_where_it_can_go_on(number, code, tmp_path):
    for batches in (2, 10, 9):
        (tmp_path / "checkpoints" / f"batch_{batches}").mkdir(parents=True)
    for batches in (2, 9):
        (tmp_path / "checkpoints" / f"batch_{batches}" / "COMMITTED").touch()
    with rank("train", tmp_path) as child:
        for each in (number, signal.SIGTERM, signal.SIGINT):  # as torchrun and the terminal do
            child.send_signal(each)
            time.sleep(0.1)
        ended, out, last = end_of(child)
    assert ended == code
    assert out.splitlines()[1:] == ["saved"]
    assert last == (
        f"interrupted; the same command goes on after batch 9, from {tmp_path}/checkpoints/batch_9"
    )


def test_a_rank_that_loads_is_broken_off_and_lets_go_of_what_it_has(tmp_path):
    with rank("load", tmp_path, is_polled=False) as child:
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGTERM)
        assert end_of(child) == (143, "released\n", f"interrupted; {where_to_go_on(tmp_path)}")


def test_a_signal_that_another_thread_gets_breaks_off_the_main_one(tmp_path):
    with rank("asked_through_another_thread", tmp_path, is_polled=False) as child:
        assert end_of(child) == (143, "released\n", f"interrupted; {where_to_go_on(tmp_path)}")


def test_another_rank_that_loads_ends_without_a_word(tmp_path):
    with rank("load", tmp_path, number=1, is_polled=False) as child:
        child.send_signal(signal.SIGINT)
        assert end_of(child) == (130, "", "")


@pytest.mark.parametrize("is_polled", [True, False])
def test_a_main_thread_that_stands_in_c_does_not_outlive_the_grace(is_polled, tmp_path):
    with rank("blocked_in_c", tmp_path, is_polled=is_polled, grace_s=1.0) as child:
        wait_until_it_sleeps(child.pid)
        child.send_signal(signal.SIGTERM)
        code, out, _ = end_of(child)
    assert code == 143
    assert out.splitlines()[-1].startswith("interrupted: ended at once, it did not come to an end")


def test_a_deliberate_second_ctrl_c_ends_at_once(tmp_path):
    with rank("blocked_in_c", tmp_path, same_s=0.3) as child:
        child.send_signal(signal.SIGINT)
        time.sleep(0.1)
        child.send_signal(signal.SIGTERM)  # the same request
        time.sleep(1.0)
        assert child.poll() is None
        child.send_signal(signal.SIGINT)
        code, out, _ = end_of(child)
    assert code == 130
    assert out.splitlines()[-1] == "interrupted: ended at once, by a second Ctrl-C"


def test_a_rank_whose_neighbour_was_asked_ends_with_it(tmp_path):
    with rank("asked_by_a_neighbour", tmp_path) as child:
        assert end_of(child) == (143, "", f"interrupted; {where_to_go_on(tmp_path)}")


def test_a_rank_ends_in_order_when_torchrun_is_killed(tmp_path):
    values = {"grace_s": 30.0, "same_s": 60.0, "folder": str(tmp_path)}
    code = RANK.format(state="train", is_polled=True, **values)
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, code],
        cwd=REPOSITORY,
        env=os.environ | {"RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert agent.stdout.readline() == "ready\n"
        agent.kill()
        agent.wait()
        assert select.select([agent.stdout], [], [], 30)[0], "the rank trains on"
        said = agent.stdout.read().splitlines()  # the pipe ends with the rank, which inherited it
        assert said == ["SIGTERM: ending in order; once more ends at once", "saved"]
    finally:
        agent.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)


@pytest.mark.parametrize("end, is_interrupted", [(stop_in_order, False), (Event.set, True)])
def test_a_run_that_stops_by_itself_has_not_been_interrupted(tmp_path, end, is_interrupted):
    stop = StopRequest()
    answers = RankInterrupts(stop, is_main=True, say=print)
    expected = pytest.raises(Interrupted) if is_interrupted else contextlib.nullcontext()
    with expected, answers.on_interrupt(tmp_path):
        end(stop)
