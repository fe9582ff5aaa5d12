"""Rank 0 that loses its controller: what is forgotten, what is told again, when it is enough."""

import itertools
import threading
from dataclasses import dataclass
from threading import Event
from types import SimpleNamespace

import pytest
from fake_cluster import PENDING, FakeActor, FakeCluster

from async_grpo.config.train_config import TrainConfig
from async_grpo.run import main_rank
from async_grpo.run.main_rank import MAX_RECOVERIES, MainRank, RunAtController
from async_grpo.run.sampled_data import SampledData
from async_grpo.training.ranks import Absent
from async_grpo.types import EndOfStep, Minibatch, ResumePoint
from async_grpo.util.errors import ClusterError, ProcessLostError, RunLost

LOST = RunLost("the controller died")
ROUND = Minibatch(0, ())


def end(step):
    return EndOfStep(0, step, False, 1, 1, resume=ResumePoint(0, step + 1, {}))


@dataclass
class Plan:
    config: object
    sets: tuple[str, ...] = ("held out",)
    incarnation: int = 7
    resume: object = None
    settings: object = None
    pending: tuple[object, ...] = ()


class NoWait(Event):
    def wait(self, timeout=None):
        return self.is_set()


class World(FakeCluster):
    """Rank 0, alone, whose controllers give scripted items and then are lost.

    One epoch a life; the world is what all of its controllers answer.
    """

    hello = heard = hungry = None

    def __init__(self, folder, *lives, stop=None, **options):
        super().__init__(Controller=lambda code: FakeActor(self))
        self.lives, self.told = list(lives), []
        self.failures = []  # of the next beginnings
        self.evaluations = {}  # by epoch; where none is given, its number
        self.ranks = SimpleNamespace(
            rank=0, agree=int, on_main=lambda work: work(), share=lambda work: work()
        )
        config = TrainConfig(
            model_name_or_path="m", data_path="d", stall_timeout_s=60.0, output_dir=str(folder),
            **options,
        )  # fmt: skip
        learner = FakeLearner(config, self.told)
        announcements = SimpleNamespace(
            wait=lambda: self.told.append("waited"),
            repeat=lambda client: self.told.append(f"repeated to {client.run.epoch}"),
        )
        weights = SimpleNamespace(announcements=announcements)
        run = RunAtController(
            Plan(config), self, recruit=lambda client: self.told.append("recruited")
        )
        self.told.clear()
        self.main = MainRank(run, weights, None, teachers={}, code={})
        self.main.report = Report(self.told)
        self.stop = stop or Event()
        self.data = SampledData(self.ranks, learner, self.main, self, self.stop)

    def rest(self, run):
        self.told.append("engines rest")

    def begin_run(self, plan, witness, recorder):
        if self.failures:
            return self.failures.pop()
        self.told.append(plan.resume)
        self.num_epochs = getattr(self, "num_epochs", -1) + 1
        return self.num_epochs

    def next_items(self, run, rank, index):
        life = self.lives[run.epoch]
        item = life[index] if index < len(life) else None  # the run has ended
        return item if item is None or isinstance(item, Exception) else (item,)

    def evaluated(self, run):
        return self.evaluations.get(run.epoch, ("evaluated", run.epoch))

    def status(self, run):
        return SimpleNamespace(moves=(1, 2), problem="no worker is free")


class FakeLearner:
    def __init__(self, config, told):
        self.config, self.told, self.parked = config, told, None
        self.algorithm = SimpleNamespace(teacher_need=None)

    def discard(self):
        self.told.append("discarded")

    def park(self):
        self.parked = self.parked or self.told.append("parked") or True

    def unpark(self):
        if self.parked:
            self.parked = self.told.append("unparked")


class Report(Absent):
    def __init__(self, told):
        self.told = told

    def recovered(self):
        self.told.append("recovered")

    def evaluation(self, result):
        self.told.append(result)

    def unevaluated(self, reason):
        self.told.append(f"unevaluated: {reason}")


def test_a_stream_goes_on_after_the_latest_end_of_a_step_that_all_agreed_on(tmp_path):
    world = World(tmp_path, [ROUND, end(0), ROUND, LOST], [ROUND, LOST], [end(1)])
    assert list(world.data) == [ROUND, end(0), ROUND, ROUND, end(1)]
    path = ["discarded", "waited", ResumePoint(0, 1, {}), "recruited"]
    assert world.told == [*path, "repeated to 1", "recovered", *path, "repeated to 2", "recovered"]


def test_before_any_end_of_a_step_the_run_begins_where_it_began(tmp_path):
    world = World(tmp_path, [ROUND, LOST], [ROUND])
    assert list(world.data) == [ROUND, ROUND]
    assert world.told[:3] == ["discarded", "waited", None]


def test_ranks_leave_devices_that_are_had_in_turns_before_weights_wake_the_engines(tmp_path):
    world = World(tmp_path, [ROUND, LOST], [ROUND], colocated=True)
    world.data._unannounced = 0  # by `publish`
    world.main.weights.announce = lambda client, batches: world.told.append("announced")
    assert list(world.data) == [ROUND, ROUND]
    before, again = world.told[:3], world.told[3:]
    assert before == ["parked", "announced", "unparked"]
    assert again[:3] == ["discarded", "parked", "waited"]
    assert again[-3:] == ["repeated to 1", "recovered", "unparked"]


def test_ranks_that_stop_while_engines_have_their_devices_take_these_before_they_save(tmp_path):
    world = World(tmp_path, [PENDING], colocated=True)
    world.data._unannounced = 0
    world.main.weights.announce = lambda client, batches: world.told.append("announced")
    world.stop.set()
    assert list(world.data) == []
    assert world.told == ["parked", "announced", "engines rest", "unparked"]


def test_a_controller_that_is_lost_in_a_recovery_is_one_more_loss(tmp_path):
    world = World(tmp_path, [LOST], [ROUND])
    world.failures = [ProcessLostError("gone again")]
    assert list(world.data) == [ROUND]
    assert world.main.run._num_recoveries == 2


def test_a_run_that_loses_its_controllers_too_often_ends(tmp_path):
    world = World(tmp_path, *[[LOST]] * (MAX_RECOVERIES + 1))
    with pytest.raises(ClusterError, match="lost 4 times in this run, the last time: the contr"):
        next(world.data)


def test_a_loss_that_rank_0_has_met_before_its_stream_is_recovered_from_once(tmp_path):
    """While rank 0 waits for evaluations it recovers; the ranks then find the run's next epoch."""
    world = World(tmp_path, [end(0), LOST], [end(1)])
    assert next(world.data) == end(0)
    world.evaluations[0] = ProcessLostError("gone")
    world.data.finish_evaluations()
    assert world.told[-3:-1] == ["evaluated", 1]
    assert next(world.data) == end(1)
    assert world.told.count("recovered") == 1


def test_a_request_to_stop_breaks_off_an_evaluation(tmp_path):
    world = World(tmp_path, [end(0)])
    world.evaluations[0] = PENDING
    threading.Timer(0.1, world.stop.set).start()
    world.data.finish_evaluations()
    assert world.told == ["waited", "unevaluated: the run was stopped before its end"]


def test_an_evaluation_may_take_as_long_as_it_moves(tmp_path, monkeypatch):
    world, heard, tokens = World(tmp_path, [end(0)], stop=NoWait()), [], itertools.count()
    ready = iter([False] * 100 + [True])
    world.ranks.agree = heard.append
    monkeypatch.setattr(main_rank.time, "monotonic", itertools.count(step=10).__next__)
    world.is_ready = lambda call: next(ready)
    world.status = lambda run: SimpleNamespace(moves=next(tokens))
    world.evaluations[0] = ["result"]
    world.data.finish_evaluations()
    assert world.told[-2] == "result"
    assert next(tokens) > 10 and len(heard) > 10


def test_an_evaluation_that_stands_still_is_waited_for_no_longer(tmp_path, monkeypatch):
    world = World(tmp_path, [end(0)], stop=NoWait())
    monkeypatch.setattr(main_rank.time, "monotonic", itertools.count(step=10).__next__)
    world.evaluations[0] = PENDING
    world.data.finish_evaluations()
    why = "unevaluated: nothing has moved for --stall-timeout-s 60: no worker is free"
    assert world.told == ["waited", why]
