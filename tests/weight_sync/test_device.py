"""Sending ahead of the object store: who is reached, who is not; the ranks gather to the end."""

import threading
import time
from dataclasses import replace
from functools import partial

import pytest
from fake_cluster import client_of

from async_grpo.config.roles import GENERATION
from async_grpo.types import WeightsSnapshot, WeightsVersion, WorkerInfo
from async_grpo.util.errors import ConfigError, DeadlineError, ProcessLostError, WorkerError
from async_grpo.weight_sync.routes import check_route
from async_grpo.weight_sync.transport import DeviceSender

FIRST, SECOND = (WeightsSnapshot(WeightsVersion(0, batch), ()) for batch in (0, 1))
TIMEOUT_S = 1.0


class FakeHandle:
    def __init__(self, refusal=None):
        self.refusal, self.asked = refusal, []

    @property
    def expect_weights(self):
        return self

    def remote(self, snapshot):
        self.asked.append(snapshot)
        return self.refusal


class FakeLink:
    """Remembers what was sent; hangs until it is closed, or fails, when it was told to."""

    def __init__(self, members, behaviour):
        self.members = [worker.worker_id for worker in members]
        self.behaviour = behaviour
        self.sent = []
        self.closed = threading.Event()

    def send(self, snapshot, tensors, *, deadline, on_failure):
        first = next(tensors)
        if self.behaviour == "fail":
            raise RuntimeError("out of memory")
        if self.behaviour == "refuse":
            on_failure(WorkerError("died"))
        if self.behaviour in ("hang", "refuse"):
            self.closed.wait(10)
            next(tensors)
        self.sent.append((snapshot, [first, *tensors]))

    def close(self):
        self.closed.set()


class Bench:
    """A sender between fakes; `links` in the order in which they were made."""

    def __init__(self, **refusals):
        self.handles = {name: FakeHandle(refusal) for name, refusal in refusals.items()}
        self.workers = [worker(name) for name in refusals]
        self.behaviour, self.links, self.gathered = "work", [], []
        self.elsewhere = set()
        self.sender = DeviceSender(self.connect, check=self.check)

    def receivers(self, role):
        assert role == GENERATION
        return tuple((info, self.handles[info.worker_id]) for info in self.workers)

    def check(self, info, *, others):
        if info.worker_id in self.elsewhere:
            raise ConfigError(f"worker {info.worker_id} has no device")

    def connect(self, members):
        self.links.append(FakeLink(members, self.behaviour))
        return self.links[-1]

    def gather(self):
        for index in range(5):
            self.gathered.append(index)
            yield f"w{index}", index

    def send(self, snapshot):
        self.gathered.clear()
        started = time.monotonic()
        self.sender.send(client_of(self), snapshot, self.gather(), timeout_s=TIMEOUT_S)
        assert self.gathered == [0, 1, 2, 3, 4], "other ranks would wait for ever"
        return time.monotonic() - started


def worker(name, *, pid=1):
    info = WorkerInfo(name, "generation", "n", pid, "m", 128, 8.0, 0.0, 512, devices=("GPU-a",))
    return replace(info, confinement={"programs of the model": ""})  # as one has that grades too


def test_one_link_leads_to_all_workers_and_is_used_again():
    bench = Bench(a=None, b=None)
    for snapshot in (FIRST, SECOND):
        bench.send(snapshot)
    (link,) = bench.links
    assert link.members == ["a", "b"]
    assert [snapshot for snapshot, _ in link.sent] == [FIRST, SECOND]
    assert [len(tensors) for _, tensors in link.sent] == [5, 5]


def test_of_two_workers_that_share_a_device_one_is_left_to_the_object_store(caplog):
    """NCCL would refuse the whole group: duplicate GPU."""
    bench = Bench(a=None, b=None)
    bench.sender._check = partial(check_route, "nccl", sender="GPU-t")
    for snapshot in (FIRST, SECOND):
        bench.send(snapshot)
    (link,) = bench.links
    assert link.members == ["a"]
    assert caplog.text.count("worker a and worker b share GPU-a: use object_store") == 1


@pytest.mark.parametrize("refusal", [WorkerError("another model"), DeadlineError("no answer")])
def test_whoever_refuses_or_does_not_answer_is_left_out_before_anything_stands_still(refusal):
    bench = Bench(a=refusal, b=None)
    bench.send(FIRST)
    assert [link.members for link in bench.links] == [["b"]]
    bench.handles["a"].refusal = None
    bench.send(SECOND)
    assert [link.members for link in bench.links] == [["b"], ["a", "b"]]
    assert bench.links[0].closed.is_set() and not bench.links[1].closed.is_set()


def test_a_link_is_made_anew_when_somebody_joins_leaves_or_comes_back():
    bench = Bench(a=None, b=None)
    bench.send(FIRST)
    del bench.workers[0]
    bench.send(SECOND)
    bench.workers.append(worker("a", pid=2))
    bench.send(SECOND)
    bench.workers[1] = worker("a", pid=3)
    bench.send(SECOND)
    assert [link.members for link in bench.links] == [["a", "b"], ["b"], ["b", "a"], ["b", "a"]]
    assert [link.closed.is_set() for link in bench.links] == [True, True, True, False]


@pytest.mark.parametrize("behaviour", ["fail", "refuse", "hang"])
def test_a_transfer_that_fails_is_aborted_and_ends_no_run(behaviour, caplog):
    bench = Bench(a=None)
    bench.behaviour = behaviour
    seconds = bench.send(FIRST)
    assert bench.links[0].closed.is_set() and bench.links[0].sent == []
    if behaviour == "hang":
        assert TIMEOUT_S * 0.9 <= seconds < 2 * TIMEOUT_S
        assert "its time is over" in caplog.text
    else:
        assert seconds < TIMEOUT_S / 2
    bench.behaviour = "work"
    bench.send(SECOND)
    assert [snapshot for snapshot, _ in bench.links[1].sent] == [SECOND]


def test_a_worker_without_a_device_is_told_of_once_and_left_to_the_object_store(caplog):
    bench = Bench(a=None, b=None)
    bench.elsewhere = {"b"}
    for _ in range(3):
        bench.send(FIRST)
    assert [link.members for link in bench.links] == [["a"]]
    assert bench.handles["b"].asked == []
    assert caplog.text.count("worker b has no device") == 1


def test_nobody_to_send_to_and_a_lost_controller_end_no_run(caplog):
    bench = Bench()
    bench.send(FIRST)
    assert bench.links == []
    bench.receivers = lambda role: ProcessLostError("the controller died")
    bench.send(SECOND)
    assert "take the object store alone: the controller died" in caplog.text
