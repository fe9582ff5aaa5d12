"""Sending ahead of the object store: who is reached, who is not; nobody waits for others."""

import threading
import time

import pytest

from async_grpo import cluster
from async_grpo.errors import ConfigError, WorkerError
from async_grpo.roles import GENERATION, REFERENCE
from async_grpo.types import WeightsSnapshot, WeightsVersion, WorkerInfo
from async_grpo.weight_sync.device import NUM_SENDERS, DeviceTransport

FIRST, SECOND = (WeightsSnapshot(WeightsVersion(0, batch), ()) for batch in (0, 1))
TIMEOUT_S = 6.0


class FakeRegistry:
    def __init__(self, *names):
        self.workers = [worker(name) for name in names]

    def receivers(self, role):
        assert role == GENERATION
        return tuple((info, f"handle of {info.worker_id}") for info in self.workers)


class FakePublisher:
    """The object store, which everybody is told of after the devices."""

    def __init__(self):
        self.announced = []

    def announce(self, client, snapshot, *, roles, timeout_s):
        self.announced.append((snapshot, timeout_s))
        return {}


class FakeLink:
    """Remembers what was sent; hangs until it is closed, or fails, when it was told to."""

    def __init__(self, behaviour):
        self.behaviour = behaviour
        self.sent = []
        self.sent_at = 0.0
        self.closed = threading.Event()

    def send(self, snapshot, *, deadline, on_failure):
        if self.behaviour == "fail":
            raise WorkerError("out of memory")
        if self.behaviour == "refuse":
            on_failure(WorkerError("another model"))
        if self.behaviour in ("hang", "refuse"):
            self.closed.wait(10)
            raise RuntimeError("aborted")
        self.sent.append(snapshot)
        self.sent_at = time.monotonic()

    def close(self):
        self.closed.set()


class Bench:
    """A transport between fakes; `links` in the order in which they were made."""

    def __init__(self, *names, **behaviours):
        self.registry = FakeRegistry(*names)
        self.publisher = FakePublisher()
        self.behaviours = behaviours
        self.links = []
        self.transport = DeviceTransport(self.publisher, self.connect)

    def connect(self, info, handle):
        assert handle == f"handle of {info.worker_id}"
        behaviour = self.behaviours.get(info.worker_id, "work")
        if behaviour == "elsewhere":
            raise ConfigError(f"worker {info.worker_id} has no device")
        link = FakeLink(behaviour)
        self.links.append((info.worker_id, link))
        return link

    def announce(self, snapshot, *, roles=(GENERATION,)):
        started = time.monotonic()
        self.transport.announce(self.registry, snapshot, roles=roles, timeout_s=TIMEOUT_S)
        return time.monotonic() - started

    def link(self, name):
        return [link for owner, link in self.links if owner == name]


def worker(name, *, pid=1):
    return WorkerInfo(name, "generation", "n", pid, "m", 128, 8.0, 0.0, 512, devices=("GPU-a",))


@pytest.fixture(autouse=True)
def calls_answer_at_once(monkeypatch):
    monkeypatch.setattr(cluster, "wait", lambda call, *, timeout_s, who: call)


def test_everybody_is_sent_the_weights_and_then_told_of_them():
    bench = Bench("a", "b")
    for snapshot in (FIRST, SECOND):
        bench.announce(snapshot)
    assert [link.sent for _, link in bench.links] == [[FIRST, SECOND]] * 2
    assert [snapshot for snapshot, _ in bench.publisher.announced] == [FIRST, SECOND]


def test_a_worker_that_hangs_holds_up_no_other():
    bench = Bench("a", "b", "c", b="hang")
    started = time.monotonic()
    seconds = bench.announce(FIRST)
    for name in "ac":
        (link,) = bench.link(name)
        assert link.sent == [FIRST] and link.sent_at - started < TIMEOUT_S / 4
    assert bench.link("b")[0].closed.is_set()
    assert TIMEOUT_S / 2 <= seconds < TIMEOUT_S * 3 / 4
    ((_, left_s),) = bench.publisher.announced
    assert TIMEOUT_S / 4 < left_s <= TIMEOUT_S / 2


def test_a_link_that_failed_is_made_anew_and_no_other_is():
    bench = Bench("a", "b", a="fail")
    assert bench.announce(FIRST) < TIMEOUT_S / 4
    bench.behaviours = {}
    bench.announce(SECOND)
    failed, again = bench.link("a")
    assert failed.closed.is_set() and not again.closed.is_set()
    assert again.sent == [SECOND]
    assert [link.sent for link in bench.link("b")] == [[FIRST, SECOND]]
    assert len(bench.publisher.announced) == 2, "nobody may miss an announcement for it"


def test_a_refusal_ends_the_wait_though_the_sender_still_hangs():
    bench = Bench("a", "b", a="refuse")
    assert bench.announce(FIRST) < TIMEOUT_S / 4
    assert bench.link("a")[0].closed.wait(1)
    assert bench.link("b")[0].sent == [FIRST]


def test_the_link_of_a_worker_that_left_is_closed():
    bench = Bench("a", "b")
    bench.announce(FIRST)
    del bench.registry.workers[0]
    bench.announce(SECOND)
    assert bench.link("a")[0].closed.is_set() and bench.link("a")[0].sent == [FIRST]
    assert not bench.link("b")[0].closed.is_set()


def test_a_worker_that_came_back_under_its_name_gets_its_own_link():
    bench = Bench("a")
    bench.announce(FIRST)
    bench.registry.workers = [worker("a", pid=2)]
    bench.announce(SECOND)
    assert [link.sent for link in bench.link("a")] == [[FIRST], [SECOND]]


def test_a_late_joiner_without_a_device_is_left_to_the_object_store(caplog):
    bench = Bench("a", b="elsewhere")
    bench.announce(FIRST)
    bench.registry.workers.append(worker("b"))
    for _ in range(3):
        bench.announce(SECOND)
    assert bench.link("a")[0].sent == [FIRST, SECOND, SECOND, SECOND]
    assert len(bench.publisher.announced) == 4
    assert caplog.text.count("worker b has no device") == 1


def test_senders_that_hang_for_ever_leave_room_for_the_next_update():
    names = [f"w{index}" for index in range(NUM_SENDERS)]
    bench = Bench(*names, **dict.fromkeys(names, "refuse"))
    for link in (bench.connect(*receiver) for receiver in bench.registry.receivers(GENERATION)):
        link.close = lambda: None  # not even an abort frees these threads
        bench.transport._links[bench.registry.workers[len(bench.transport._links)]] = link
    bench.announce(FIRST)
    bench.behaviours = {}
    assert bench.announce(SECOND) < TIMEOUT_S / 4
    assert all(bench.link(name)[-1].sent == [SECOND] for name in names)
    for _, link in bench.links:
        link.closed.set()


def test_weights_that_only_have_a_new_name_are_not_sent():
    bench = Bench("a")
    bench.announce(FIRST)
    bench.announce(FIRST.renamed(SECOND.version))
    assert bench.link("a")[0].sent == [FIRST]
    assert bench.publisher.announced[1][0].version == SECOND.version


def test_the_reference_role_is_told_and_not_sent():
    bench = Bench()
    bench.announce(FIRST, roles=(REFERENCE,))
    assert bench.links == [] and len(bench.publisher.announced) == 1


def test_a_device_holds_the_tensors_of_few_senders_at_a_time():
    names = [f"w{index}" for index in range(3 * NUM_SENDERS)]
    bench = Bench(*names)
    lock, at_once, highest = threading.Lock(), 0, 0

    def send(self, snapshot, *, deadline, on_failure):
        nonlocal at_once, highest
        with lock:
            at_once += 1
            highest = max(highest, at_once)
        time.sleep(0.02)
        with lock:
            at_once -= 1
        self.sent.append(snapshot)

    for info, handle in bench.registry.receivers(GENERATION):
        link = bench.connect(info, handle)
        link.send = send.__get__(link)
        bench.transport._links[info] = link
    bench.announce(FIRST)
    assert highest == NUM_SENDERS
    assert all(link.sent == [FIRST] for _, link in bench.links)
