"""Rank 0 that loses its controller: what is forgotten, what is told again, when it is enough."""

import itertools
import threading
from threading import Event
from types import SimpleNamespace

import pytest

from async_grpo.config.train_config import TrainConfig
from async_grpo.run import main_rank, sampled_data
from async_grpo.run.main_rank import MAX_RECOVERIES, MainRank
from async_grpo.run.sampled_data import SampledData
from async_grpo.types import EndOfStep, Minibatch, ResumePoint
from async_grpo.util.errors import ClusterError, ProcessLostError, RunLost

LOST = RunLost("the controller died")
ROUND = Minibatch(0, ())


def end(step):
    return EndOfStep(0, step, False, 1, 1, resume=ResumePoint(0, step + 1, {}))


class World:
    """Rank 0, alone, whose controllers give scripted items and then are lost."""

    def __init__(self, monkeypatch, *lives):
        self.lives, self.told, self.clients = list(lives), [], []
        self.failures = []  # of the next beginnings
        self.main = main = object.__new__(MainRank)
        config = TrainConfig(model_name_or_path="m", data_path="d", stall_timeout_s=60.0)
        main.plan = SimpleNamespace(config=config, sets=("held out",))
        main.report = SimpleNamespace(
            stood_still=lambda metric, seconds: self.told.append(seconds) if seconds else None,
            recovered=lambda: self.told.append("recovered"),
            doing=lambda what: None,
            evaluation=lambda result: self.told.append(result),
            unevaluated=lambda reason: self.told.append(f"unevaluated: {reason}"),
        )
        main._cut, main._num_recoveries, main._demand = None, 0, None
        main._journal = SimpleNamespace(done=lambda controls, *, from_batch: None)
        main._announcements = SimpleNamespace(
            wait=lambda: self.told.append("waited"),
            repeat=lambda client: self.told.append(f"repeated to {client.number}"),
        )
        main._begin = self.begin
        main.client = self.begin(None)
        self.told.clear()
        monkeypatch.setattr(main_rank, "find_or_make_controller", lambda: None)
        monkeypatch.setattr(
            main_rank, "recruit", lambda controller, demand: self.told.append("recruited")
        )
        monkeypatch.setattr(sampled_data, "RankStream", self.stream)
        ranks = SimpleNamespace(
            rank=0, agree=int, on_main=lambda work: work(), share=lambda work: work()
        )
        learner = SimpleNamespace(
            config=config,
            algorithm=SimpleNamespace(teacher_need=None),
            discard=lambda: self.told.append("discarded"),
        )
        self.stop = Event()
        self.ranks = ranks
        self.data = SampledData(ranks, learner, main, self.stop)

    def begin(self, controller):
        if self.failures:
            raise self.failures.pop()
        self.told.append(self.main._cut)
        number = len(self.clients)
        client = SimpleNamespace(
            number=number,
            controller=None,
            evaluated=lambda: ("evaluated", number),
            status=lambda: "status",
        )
        self.clients.append(client)
        return client

    def stream(self, client, **_):
        return Life(client, self.lives[client.number])


class Life:
    """The stream of one epoch of the run."""

    is_stopped = False

    def __init__(self, client, items):
        self.client, self.items = client, iter(items)

    def __next__(self):
        item = next(self.items)
        if isinstance(item, Exception):
            raise item
        return item

    def take_seconds_waiting(self):
        return 0.0


def test_a_stream_goes_on_after_the_latest_end_of_a_step_that_all_agreed_on(monkeypatch):
    world = World(monkeypatch, [ROUND, end(0), ROUND, LOST], [ROUND, LOST], [end(1)])
    assert list(world.data) == [ROUND, end(0), ROUND, ROUND, end(1)]
    path = ["discarded", "waited", ResumePoint(0, 1, {}), "recruited"]
    assert world.told == [*path, "repeated to 1", "recovered", *path, "repeated to 2", "recovered"]


def test_before_any_end_of_a_step_the_run_begins_where_it_began(monkeypatch):
    world = World(monkeypatch, [ROUND, LOST], [ROUND])
    assert list(world.data) == [ROUND, ROUND]
    assert world.told[:3] == ["discarded", "waited", None]


def test_a_controller_that_is_lost_in_a_recovery_is_one_more_loss(monkeypatch):
    world = World(monkeypatch, [LOST], [ROUND])
    world.failures = [ProcessLostError("gone again")]
    assert list(world.data) == [ROUND]
    assert world.main._num_recoveries == 2


def test_a_run_that_loses_its_controllers_too_often_ends(monkeypatch):
    world = World(monkeypatch, *[[LOST]] * (MAX_RECOVERIES + 1))
    with pytest.raises(ClusterError, match="lost 4 times in this run, the last time: the contr"):
        next(world.data)


def test_a_loss_that_rank_0_has_met_before_its_stream_is_recovered_from_once(monkeypatch):
    """While rank 0 waits for evaluations it recovers; the ranks then find the run's next epoch."""
    world = World(monkeypatch, [end(0), LOST], [end(1)])
    assert next(world.data) == end(0)

    def wait(call, *, timeout_s, who):
        if call == ("evaluated", 0):
            raise ProcessLostError("gone")
        return call

    monkeypatch.setattr(main_rank.cluster, "wait", wait)
    monkeypatch.setattr(main_rank.cluster, "is_ready", lambda call: True)
    world.data.finish_evaluations()
    assert world.told[-3:-1] == ["evaluated", 1]
    assert next(world.data) == end(1)
    assert world.told.count("recovered") == 1


def test_a_request_to_stop_breaks_off_an_evaluation(monkeypatch):
    world = World(monkeypatch, [end(0)])
    monkeypatch.setattr(main_rank.cluster, "is_ready", lambda call: False)
    threading.Timer(0.1, world.stop.set).start()
    world.data.finish_evaluations()
    assert world.told == ["waited", "unevaluated: the run was stopped before its end"]


def test_an_evaluation_may_take_as_long_as_it_moves(monkeypatch):
    world, heard, tokens = World(monkeypatch, [end(0)]), [], itertools.count()
    ready = iter([False] * 100 + [True])
    world.ranks.agree = heard.append
    monkeypatch.setattr(main_rank, "STOP_POLL_S", 0.0)
    monkeypatch.setattr(main_rank.time, "monotonic", itertools.count(step=10).__next__)
    monkeypatch.setattr(main_rank.cluster, "is_ready", lambda call: next(ready))
    monkeypatch.setattr(
        main_rank.cluster,
        "wait",
        lambda call, **_: SimpleNamespace(moves=next(tokens)) if call == "status" else ["result"],
    )
    world.data.finish_evaluations()
    assert world.told[-2] == "result"
    assert next(tokens) > 10 and len(heard) > 10


def test_an_evaluation_that_stands_still_is_waited_for_no_longer(monkeypatch):
    world = World(monkeypatch, [end(0)])
    monkeypatch.setattr(main_rank, "STOP_POLL_S", 0.0)
    monkeypatch.setattr(main_rank.time, "monotonic", itertools.count(step=10).__next__)
    monkeypatch.setattr(main_rank.cluster, "is_ready", lambda call: False)
    status = SimpleNamespace(moves=(1, 2), problem="no worker is free")
    monkeypatch.setattr(main_rank.cluster, "wait", lambda call, **_: status)
    world.data.finish_evaluations()
    why = "unevaluated: nothing has moved for --stall-timeout-s 60: no worker is free"
    assert world.told == ["waited", why]
