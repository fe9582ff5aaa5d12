"""Ranks that lose their batcher: what is forgotten, what is asked again, and when it is enough."""

import itertools
import threading
from threading import Event
from types import SimpleNamespace

import pytest

from async_grpo.errors import BatcherLostError, ClusterError, DeadlineError, ProcessLostError
from async_grpo.run import recovery
from async_grpo.run.recovery import MAX_BATCHER_RESTARTS, BatcherKeeper, LastingStream
from async_grpo.types import EndOfStep, Minibatch, Problem, ResumePoint


class World:
    """One rank with a keeper, whose batchers give scripted items and then die."""

    def __init__(self, monkeypatch, *lives):
        self.lives, self.told, self.discarded = list(lives), [], 0
        self.run = SimpleNamespace(batcher=Batcher(0), restart_batcher=self.restart)
        self.sync = SimpleNamespace(
            wait=lambda: self.told.append("waited"), tell_batcher=lambda: self.told.append("told")
        )
        self.num_restarts = 0
        self.keeper = BatcherKeeper(self.run, self.sync, self.count)
        monkeypatch.setattr(recovery, "RankStream", self.stream)

    def count(self):
        self.num_restarts += 1

    def restart(self, resume):
        self.told.append(resume)
        self.run.batcher = Batcher(self.run.batcher.number + 1)

    def stream(self, batcher, **_):
        return Life(self.lives[batcher.number])

    def lasting(self):
        config = SimpleNamespace(stall_timeout_s=1.0)
        ranks = SimpleNamespace(rank=0, agree=int, on_main=call, share=call)
        learner = SimpleNamespace(discard=self.discard)
        return LastingStream(config, ranks, learner=learner, keeper=self.keeper)

    def discard(self):
        self.discarded += 1


def call(prepare):
    return prepare()


class Batcher:
    """A handle."""

    def __init__(self, number):
        self.number = number
        self.evaluate = SimpleNamespace(remote=lambda: ("evaluate", number))
        self.status = SimpleNamespace(remote=lambda: "status")
        self._actor_id = bytes([number])


class Life:
    """A stream of one batcher."""

    is_stopped = False

    def __init__(self, items):
        self.items = iter(items)

    def __next__(self):
        item = next(self.items)
        if isinstance(item, Exception):
            raise item
        return item

    def take_seconds_waiting(self):
        return 1.0


def end(step):
    return EndOfStep(0, step, False, 1, 1, resume=ResumePoint(0, step + 1, {}))


LOST = BatcherLostError("the experience batcher died")
ROUND = Minibatch(0, ())


def test_a_stream_goes_on_with_the_next_batcher_at_the_latest_end_of_a_step(monkeypatch):
    world = World(monkeypatch, [ROUND, end(0), ROUND, LOST], [ROUND, LOST], [end(1)])
    stream = world.lasting()
    assert list(stream) == [ROUND, end(0), ROUND, ROUND, end(1)]
    assert world.told == ["waited", ResumePoint(0, 1, {}), "told"] * 2
    assert (world.discarded, world.num_restarts) == (2, 2)
    assert stream.take_seconds_waiting() == 3.0


def test_before_any_end_of_a_step_the_run_begins_again(monkeypatch):
    world = World(monkeypatch, [ROUND, LOST], [ROUND])
    assert list(world.lasting()) == [ROUND, ROUND]
    assert world.told == ["waited", None, "told"]


def test_a_batcher_that_dies_too_often_ends_the_run(monkeypatch):
    world = World(monkeypatch, *[[LOST]] * (MAX_BATCHER_RESTARTS + 1))
    with pytest.raises(ClusterError, match="died 4 times in this run, the last time: the exper"):
        next(world.lasting())
    assert world.num_restarts == MAX_BATCHER_RESTARTS


def test_an_evaluation_whose_batcher_dies_is_asked_of_the_next_one(monkeypatch):
    """While rank 0 evaluates, it makes the next batcher; the ranks then find that it is there."""
    world = World(monkeypatch, [end(0), LOST], [end(1)])
    stream = world.lasting()
    assert next(stream) == end(0)

    def wait(call, *, timeout_s, who):
        if call == ("evaluate", 0):
            raise ProcessLostError("gone")
        return call

    monkeypatch.setattr(recovery.cluster, "wait", wait)
    monkeypatch.setattr(recovery.cluster, "is_ready", lambda call: True)
    assert evaluate(world) == ("evaluate", 1)
    assert next(stream) == end(1)
    assert world.told == ["waited", ResumePoint(0, 1, {}), "told"]
    assert world.num_restarts == 1


def test_another_rank_waits_until_it_finds_the_batcher_that_rank_0_means(monkeypatch):
    """For a moment the name still leads to the dead one, or nowhere."""
    found = iter([Batcher(0), None, Batcher(1)])
    monkeypatch.setattr(recovery, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(recovery.cluster, "find_actor", lambda name: next(found))
    assert recovery.find_batcher("01").number == 1
    monkeypatch.setattr(recovery, "FIND_TIMEOUT_S", 0.05)
    monkeypatch.setattr(recovery.cluster, "find_actor", lambda name: None)
    with pytest.raises(ClusterError, match="rank 0's experience batcher has gone"):
        recovery.find_batcher("01")


def test_a_batcher_that_was_replaced_already_is_not_replaced_again(monkeypatch):
    world = World(monkeypatch)
    dead = world.run.batcher
    world.keeper.replace(dead, "gone")
    world.keeper.replace(dead, "gone")
    assert (world.run.batcher.number, world.num_restarts) == (1, 1)


def evaluate(world, *, stop=None, stall_timeout_s=60.0, meanwhile=lambda: None):
    return world.keeper.evaluate(
        stall_timeout_s=stall_timeout_s, stop=stop or Event(), meanwhile=meanwhile
    )


def test_a_request_to_stop_breaks_off_an_evaluation(monkeypatch):
    world, stop = World(monkeypatch, [end(0)]), Event()
    monkeypatch.setattr(recovery.cluster, "is_ready", lambda call: False)
    threading.Timer(0.1, stop.set).start()
    assert evaluate(world, stop=stop) is None


def test_an_evaluation_may_take_as_long_as_it_moves(monkeypatch):
    """And the other ranks hear of it."""
    world, told, tokens = World(monkeypatch, [end(0)]), [], itertools.count()
    ready = iter([False] * 100 + [True])
    monkeypatch.setattr(recovery, "STOP_POLL_S", 0.0)
    monkeypatch.setattr(recovery.time, "monotonic", itertools.count(step=10).__next__)
    monkeypatch.setattr(recovery.cluster, "is_ready", lambda call: next(ready))
    monkeypatch.setattr(
        recovery.cluster,
        "wait",
        lambda call, **_: SimpleNamespace(moves=next(tokens)) if call == "status" else "result",
    )
    assert evaluate(world, meanwhile=lambda: told.append("evaluating")) == "result"
    assert next(tokens) > 10 and len(told) > 10


def test_an_evaluation_that_stands_still_ends_the_run(monkeypatch):
    world = World(monkeypatch, [end(0)])
    monkeypatch.setattr(recovery, "STOP_POLL_S", 0.0)
    monkeypatch.setattr(recovery.time, "monotonic", itertools.count(step=10).__next__)
    monkeypatch.setattr(recovery.cluster, "is_ready", lambda call: False)
    status = SimpleNamespace(moves=(1, 2), problem=Problem("generation", "no worker is free"))
    monkeypatch.setattr(recovery.cluster, "wait", lambda call, **_: status)
    with pytest.raises(
        DeadlineError, match="for --stall-timeout-s 60: generation: no worker is free"
    ):
        evaluate(world)
