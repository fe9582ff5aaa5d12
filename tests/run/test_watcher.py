"""What the status of the batcher has rank 0 say."""

import threading

from async_grpo.run import watcher
from async_grpo.telemetry.incidents import Incidents
from async_grpo.types import PipelineStatus


def status(*warnings):
    counts = dict.fromkeys(("batch", "generating", "verifying", "in_reference", "ready"), 0)
    counts |= dict.fromkeys(("training", "done", "output_tokens", "answers", "reward_count"), 0)
    return PipelineStatus(reward_sum=0.0, warnings=warnings, **counts)


def test_each_warning_is_said_once_and_the_last_ones_at_the_end(monkeypatch, caplog):
    told = threading.Event()
    statuses = [status("first"), status("first")]

    def next_status():
        if statuses:
            return statuses.pop(0)
        told.set()
        return status("first", "last")

    monkeypatch.setattr(watcher, "INTERVAL_S", 0.01)
    monkeypatch.setattr(watcher, "call_the_roll", lambda *_, **__: None)
    monkeypatch.setattr(watcher, "_status", next_status)
    with watcher.watch_pipeline(lambda status: None, Incidents()):
        assert told.wait(10.0)
    assert [record.message for record in caplog.records] == ["first", "last"]


def test_a_run_that_ends_at_once_has_said_its_warnings(monkeypatch, caplog):
    monkeypatch.setattr(watcher, "INTERVAL_S", 1000.0)
    monkeypatch.setattr(watcher, "_status", lambda: status("only"))
    with watcher.watch_pipeline(lambda status: None, Incidents()):
        pass
    assert caplog.messages == ["only"]
