"""What the status of the controller has rank 0 say."""

import threading
import time

from fake_cluster import FakeCluster, client_of

from async_grpo.run.watch import Watcher
from async_grpo.telemetry.incidents import Incidents
from async_grpo.types import PipelineStatus


def status(*warnings):
    counts = dict.fromkeys(("batch", "generating", "verifying", "in_reference", "ready"), 0)
    counts |= dict.fromkeys(("training", "done", "output_tokens", "answers", "reward_count"), 0)
    return PipelineStatus(reward_sum=0.0, warnings=warnings, **counts)


class Controller:
    """Has one status after the other ready."""

    roles = ()

    def __init__(self, *statuses):
        self.statuses, self.num_heard = list(statuses), 0
        self.is_asked_last = threading.Event()

    def heard(self, run):
        self.num_heard += 1

    def status(self, run):
        if len(self.statuses) == 1:
            self.is_asked_last.set()
            return self.statuses[0]
        return self.statuses.pop(0)


def watch(controller, *, interval_s, cluster=None):
    client = client_of(controller, cluster)
    kind = type("OfThisInterval", (Watcher,), {"interval_s": interval_s})
    return kind(lambda: client, Incidents())


def test_each_warning_is_said_once_and_the_last_ones_at_the_end(caplog):
    controller = Controller(status("first"), status("first"), status("first", "last"))
    watching = watch(controller, interval_s=0.01)
    assert controller.is_asked_last.wait(10.0)
    watching.close()
    assert [record.message for record in caplog.records] == ["first", "last"]


def test_a_run_that_ends_at_once_has_said_its_warnings(caplog):
    watch(Controller(status("only")), interval_s=1000.0).close()
    assert caplog.messages == ["only"]


class NothingReady(FakeCluster):
    def is_ready(self, call, *, within_s=0.0):
        return False


def test_an_answer_that_does_not_come_holds_up_no_sign_of_life():
    controller = Controller(status(), status())
    watching = watch(controller, interval_s=0.01, cluster=NothingReady())
    deadline = time.monotonic() + 10.0
    while controller.num_heard < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    watching.close()
    assert controller.num_heard >= 5
