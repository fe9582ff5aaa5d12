"""What the status of the controller has rank 0 say."""

import threading
import time

import pytest

from async_grpo.run import watch
from async_grpo.run.watch import Watcher
from async_grpo.telemetry.incidents import Incidents
from async_grpo.types import PipelineStatus


def status(*warnings):
    counts = dict.fromkeys(("batch", "generating", "verifying", "in_reference", "ready"), 0)
    counts |= dict.fromkeys(("training", "done", "output_tokens", "answers", "reward_count"), 0)
    return PipelineStatus(reward_sum=0.0, warnings=warnings, **counts)


class Client:
    """A run's client whose controller has one status after the other ready."""

    controller = None

    def __init__(self, *statuses):
        self.statuses, self.num_heard = list(statuses), 0
        self.is_asked_last = threading.Event()

    def heard(self):
        self.num_heard += 1

    def status(self):
        if len(self.statuses) == 1:
            self.is_asked_last.set()
            return self.statuses[0]
        return self.statuses.pop(0)


@pytest.fixture(autouse=True)
def answers_at_once(monkeypatch):
    monkeypatch.setattr(watch.cluster, "is_ready", lambda call: True)
    monkeypatch.setattr(watch.cluster, "wait", lambda call, **_: call)
    monkeypatch.setattr(watch, "see_members", lambda *_: None)


def test_each_warning_is_said_once_and_the_last_ones_at_the_end(monkeypatch, caplog):
    monkeypatch.setattr(watch, "INTERVAL_S", 0.01)
    client = Client(status("first"), status("first"), status("first", "last"))
    watching = Watcher(lambda: client, Incidents())
    assert client.is_asked_last.wait(10.0)
    watching.close()
    assert [record.message for record in caplog.records] == ["first", "last"]


def test_a_run_that_ends_at_once_has_said_its_warnings(monkeypatch, caplog):
    monkeypatch.setattr(watch, "INTERVAL_S", 1000.0)
    client = Client(status("only"))
    Watcher(lambda: client, Incidents()).close()
    assert caplog.messages == ["only"]


def test_an_answer_that_does_not_come_holds_up_no_sign_of_life(monkeypatch):
    monkeypatch.setattr(watch, "INTERVAL_S", 0.01)
    monkeypatch.setattr(watch.cluster, "is_ready", lambda call: False)
    client = Client(status(), status())
    watching = Watcher(lambda: client, Incidents())
    deadline = time.monotonic() + 10.0
    while client.num_heard < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    watching.close()
    assert client.num_heard >= 5
