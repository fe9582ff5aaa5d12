"""A dispatcher's workers, on a node of fakes: started, registered, lost, replaced, drained."""

import logging
from datetime import datetime
from types import SimpleNamespace

import pytest
from fake_cluster import PENDING, FakeActor, FakeCluster

from async_grpo.config.roles import GENERATION, VERIFIER
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.launch import dispatcher as module
from async_grpo.launch.actors import WorkerKind
from async_grpo.launch.dispatcher import Workers
from async_grpo.types import Standing, WorkerInfo
from async_grpo.util import deadlines
from async_grpo.util.errors import (
    ClusterError,
    ConfigError,
    ProcessLostError,
    WeightSyncError,
    WorkerError,
)

LOST = ProcessLostError("it died")


class Controller(FakeActor):
    """Admits and remembers, as long as it is the same one."""

    def __init__(self, **answers):
        self.admitted, self.excluded, self.leases = [], {}, 0
        self.run = 0
        super().__init__(**{"standing": self._standing, "register": self._register, **answers})

    def _register(self, info, handle):
        assert "dispatcher process" in info.owner
        self.admitted.append(info.worker_id)

    def _standing(self, ids):
        assert all(name.startswith(f"{role}-") for role, names in ids.items() for name in names)
        return {
            name: Standing(
                name in self.admitted and name not in self.excluded,
                self.leases,
                self.excluded.get(name, ""),
                self.run,
            )
            for names in ids.values()
            for name in names
        }


class Scene:
    """A node with 4 CPUs, in which a worker says little of itself."""

    def __init__(self, logs):
        self.controller = Controller()
        self.workers, self.said = {}, []
        self.cluster = FakeCluster(logs=logs, Controller=lambda code: self.find())
        self.killed = self.cluster.ended
        self.now_s = 1000.0
        self.num_found = 0
        self.answers = {}  # of workers that are started from now on
        self.first_answers = {}  # of the very first
        self.brings_pool = False
        self.confinement = {}  # of workers that are started from now on

    def kinds(self, config):
        pool = (WorkerKind(VERIFIER, 1, {}, self.start),) if self.brings_pool else ()
        return (WorkerKind(GENERATION, config.num_workers, {"CPU": 1.0}, self.start), *pool)

    def start(self, name):
        answers = self.answers if self.workers else self.first_answers or self.answers
        info = WorkerInfo(
            name, name.split("-")[0], "node", 7, "model", 8, 4.0, 0.0, 8,
            startup=(("importing", 8.25),), confinement=self.confinement,
        )  # fmt: skip
        self.workers[name] = FakeActor(**{"info": info, **answers})
        return self.workers[name]

    def find(self):
        self.num_found += 1
        return self.controller

    def pass_time(self, workers, seconds):
        for _ in range(int(seconds)):
            self.now_s += 1.0
            workers.check()

    @property
    def names(self):
        return list(self.workers)


@pytest.fixture
def scene(monkeypatch, tmp_path):
    scene = Scene(tmp_path)
    clock = SimpleNamespace(
        monotonic=lambda: scene.now_s, sleep=lambda s: setattr(scene, "now_s", scene.now_s + s)
    )
    monkeypatch.setattr(module, "time", clock)
    return scene


def make_workers(scene, *, kinds=None, **options):
    config = WorkerConfig(model_path="model", reward_fns="countdown", **options)
    return Workers(kinds or scene.kinds(config), config, scene.cluster, say=scene.said.append)


def test_workers_join_and_leave_with_their_dispatcher(scene):
    scene.brings_pool = True
    with make_workers(scene, num_workers=2) as workers:
        scene.pass_time(workers, 4)
        a, b, pool = scene.names
        assert scene.controller.admitted == [a, b, pool]
        assert scene.said == [f"worker {name} registered" for name in (a, b, pool)]
    leave = [("deregister", GENERATION, a), ("deregister", GENERATION, b)]
    assert scene.controller.calls[-3:] == [*leave, ("deregister", VERIFIER, pool)]
    assert scene.killed == list(scene.workers.values())


def test_workers_load_while_the_controller_is_found_and_end_when_there_is_none(scene):
    def refuse(code):
        assert len(scene.workers) == 2
        return ConfigError("of other code")

    scene.controller.answers["hello"] = refuse
    with (
        pytest.raises(ConfigError, match="of other code"),
        make_workers(scene, num_workers=2) as workers,
    ):
        workers.check()
    assert scene.killed == list(scene.workers.values()) != []


def test_how_long_a_worker_took_and_for_what_is_told(scene, caplog):
    with make_workers(scene) as workers:
        scene.pass_time(workers, 4)
        (name,) = scene.names
    assert f"worker {name} is ready after 1.0 s: 8.2 s importing" in caplog.messages


def test_each_start_of_what_is_not_confined_is_said_with_its_reason(scene):
    scene.confinement = {"own rewards": "bwrap: no", "shipped rewards": ""}
    with make_workers(scene, logging_level="CRITICAL") as workers:
        scene.pass_time(workers, 4)
        scene.controller.excluded[scene.names[0]] = "killed"
        scene.pass_time(workers, 30)
        assert len(scene.names) == 2
    warnings = [line for line in scene.said if line.startswith("WARNING")]
    assert [line.split()[1] for line in warnings] == [f"{name}:" for name in scene.names]
    for line in warnings:
        assert "own rewards run UNCONFINED" in line and "for bwrap: no (docs/" in line
        assert "shipped rewards run confined" in line


def test_a_worker_that_loads_holds_up_no_other(scene):
    scene.first_answers = {"info": PENDING}
    with make_workers(scene, num_workers=2) as workers:
        scene.pass_time(workers, 5)
        _, quick = scene.names
        assert scene.said == [f"worker {quick} registered"]


def test_the_controller_hears_of_every_role_again_and_again(scene):
    scene.brings_pool = True
    with make_workers(scene) as workers:
        scene.pass_time(workers, 3)
        asked = [list(call[1]) for call in scene.controller.calls if call[0] == "standing"]
        assert asked == [[GENERATION, VERIFIER]] * 3


def test_a_dispatcher_says_when_a_run_begins_and_ends(scene):
    with make_workers(scene) as workers:
        scene.pass_time(workers, 4)
        first, second = 1_700_000_000_000, 1_700_000_005_000  # milliseconds, five seconds apart
        num_said = len(scene.said)
        for scene.controller.run in (first, second, 0):
            scene.pass_time(workers, 3)
    began = [f"{datetime.fromtimestamp(run / 1000):%H:%M:%S}" for run in (first, second)]
    ended = "the run has ended, waiting for another"
    assert scene.said[num_said:] == [
        f"serving the run that began at {began[0]}",
        ended,
        f"serving the run that began at {began[1]}",
        ended,
    ]


@pytest.mark.parametrize("reason", ["worker w died: killed", "checksum 1, got 2"])
def test_a_lost_worker_is_replaced_after_a_pause_and_the_others_go_on(reason, scene, caplog):
    with make_workers(scene, num_workers=2) as workers:
        scene.pass_time(workers, 4)
        lost, other = scene.names
        scene.controller.excluded[lost] = reason
        scene.pass_time(workers, 1)
        assert scene.killed == [scene.workers[lost]]
        assert f"{reason}; another is started in 1 s, restart 1 of at most 5" in caplog.text
        scene.pass_time(workers, 5)
        third = scene.names[-1]
        assert scene.names == [lost, other, third]
        assert scene.controller.admitted == [lost, other, third]
        assert scene.said[-1] == f"worker {third} registered"


def test_a_lost_verifier_pool_is_replaced_like_any_worker(scene):
    scene.brings_pool = True
    with make_workers(scene) as workers:
        scene.pass_time(workers, 4)
        scene.controller.excluded[scene.names[1]] = "it died"
        scene.pass_time(workers, 6)
        assert [name.split("-")[0] for name in scene.names] == [GENERATION, VERIFIER, VERIFIER]
        assert scene.controller.admitted == scene.names


def test_a_worker_that_is_lost_too_often_ends_the_dispatcher_with_the_cause(scene):
    with make_workers(scene, max_restarts=2) as workers:
        for number in range(3):
            scene.pass_time(workers, 8)
            assert len(scene.names) == number + 1
            scene.controller.excluded[scene.names[-1]] = "its engine has died"
            if number < 2:
                scene.pass_time(workers, 1 + number)
                assert len(scene.names) == number + 1, "started before its pause of 1 or 2 s"
        with pytest.raises(
            WorkerError, match=r"^its engine has died; .* than --max-restarts 2 losses within an h"
        ):
            scene.pass_time(workers, 1)


@pytest.mark.parametrize("when", ["info", "register"])
def test_a_worker_that_cannot_start_ends_the_dispatcher_at_once(when, scene, tmp_path):
    (tmp_path / "worker-ab-01-77.err").write_text("ValueError: no room\nRuntimeError: it died\n")
    if when == "info":
        scene.answers = {"info": LOST}
    else:
        scene.controller.answers["register"] = WeightSyncError("it died")
    with (
        pytest.raises(WorkerError, match=r"^it died: ValueError: no room \(all of it in .*77.err"),
        make_workers(scene) as workers,
    ):
        scene.pass_time(workers, 3)
    assert len(scene.names) == 1


def test_a_successor_that_cannot_start_is_tried_again(scene):
    with make_workers(scene) as workers:
        scene.pass_time(workers, 3)
        scene.answers = {"info": LOST}
        scene.controller.excluded[scene.names[0]] = "its engine has died"
        scene.pass_time(workers, 3)
        scene.answers = {}
        scene.pass_time(workers, 6)
        assert len(scene.names) == 3
        assert scene.controller.admitted == [scene.names[0], scene.names[2]]


def test_what_the_user_must_correct_ends_the_dispatcher_even_when_a_worker_registers_again(scene):
    with make_workers(scene) as workers:
        scene.pass_time(workers, 3)
        scene.controller = Controller(register=ConfigError("other rewards are used by X"))
        workers._controller.answers["standing"] = LOST
        with pytest.raises(ConfigError, match=r"^other rewards are used by X$"):
            scene.pass_time(workers, 5)
    assert len(scene.names) == 1


def test_a_new_controller_gets_the_workers_again(scene):
    with make_workers(scene) as workers:
        scene.pass_time(workers, 3)
        (name,) = scene.names
        scene.controller.answers["standing"] = LOST
        scene.pass_time(workers, 1)
        scene.controller = Controller()
        scene.pass_time(workers, 4)
        assert scene.num_found == 2
        assert scene.controller.admitted == scene.names == [name]
        assert ("abort_all",) in scene.workers[name].calls
        assert scene.said == [f"worker {name} registered", f"worker {name} registered again"]
        assert scene.killed == []


def test_a_controller_that_dies_while_a_worker_registers_costs_nothing(scene):
    scene.controller.answers["register"] = LOST
    with make_workers(scene) as workers:
        scene.pass_time(workers, 2)
        scene.controller.answers["register"] = scene.controller._register
        scene.pass_time(workers, 4)
        assert scene.controller.admitted == scene.names
        assert len(scene.names) == 1


def test_a_worker_that_has_loaded_when_the_controller_is_lost_registers_at_the_next(scene):
    scene.controller.answers["standing"] = LOST
    with make_workers(scene) as workers:
        scene.pass_time(workers, 1)
        scene.controller = Controller()
        scene.pass_time(workers, 3)
        assert scene.controller.admitted == scene.names
        assert len(scene.names) == 1


def test_a_controller_that_does_not_answer_is_ended_and_another_is_looked_for(scene):
    with make_workers(scene) as workers:
        scene.pass_time(workers, 3)
        frozen = scene.controller
        frozen.answers["standing"] = PENDING
        scene.pass_time(workers, deadlines.CONTROLLER_SILENCE_S - 2)
        assert scene.killed == []
        scene.controller = Controller()
        scene.pass_time(workers, 6)
        assert scene.killed == [frozen]
        assert scene.controller.admitted == scene.names


def test_what_the_verifier_pool_complains_of_stands_on_the_console(scene, caplog):
    scene.brings_pool = True
    scene.answers = {"complaint": "the disk is full"}
    with make_workers(scene, write_failed_generation_samples=True) as workers:
        scene.pass_time(workers, 2)
    assert "the disk is full" in caplog.messages


def test_a_worker_for_which_ray_has_no_place_is_an_error_soon(scene):
    scene.cluster.pid = 0
    scene.answers = {"info": PENDING}
    with make_workers(scene) as workers:
        scene.pass_time(workers, deadlines.PLACED_S)
        with pytest.raises(ClusterError, match=r"no place for worker generation-.*its CPUs"):
            scene.pass_time(workers, 3)


def test_a_drain_waits_for_what_runs_but_not_for_ever(scene):
    scene.brings_pool = True
    with make_workers(scene) as workers:
        scene.pass_time(workers, 3)
        name, pool = scene.names
        workers.drain(timeout_s=30.0)
        assert ("drain", GENERATION, name) in scene.controller.calls
        assert ("drain", VERIFIER, pool) in scene.controller.calls
        assert scene.now_s == 1003.0
        scene.controller.leases = 2
        workers.drain(timeout_s=30.0)
        assert 1033.0 <= scene.now_s <= 1034.0
        assert scene.said[-1] == "finishing what runs, for at most 30 s; once more: at once"


def test_workers_without_room_are_refused_before_anything_is_made(scene, monkeypatch):
    monkeypatch.setattr(deadlines, "ROOM_S", 0.0)
    scene.cluster.free = {"CPU": 2.0}
    with pytest.raises(
        ClusterError, match=r"3 generation .* need 3 CPU .*, 2 of 4 are free: .*--nu"
    ):
        make_workers(scene, num_workers=3).__enter__()
    assert scene.workers == {}
    assert scene.controller.calls == []


def test_fractions_that_just_fit_are_taken(scene):
    kind = WorkerKind(GENERATION, 3, {"GPU": 0.2}, scene.start)
    scene.cluster.free = {"GPU": 0.6}
    with make_workers(scene, kinds=(kind,), num_workers=3):
        assert len(scene.names) == 3


def test_room_that_this_node_never_has_is_not_waited_for(scene):
    with pytest.raises(ConfigError, match=r"5 generation .* need 5 CPU .*, 4 of 4 are free"):
        make_workers(scene, num_workers=5).__enter__()
    assert scene.now_s == 1000.0


@pytest.fixture(autouse=True)
def heard(caplog):
    caplog.set_level(logging.INFO, logger="async_grpo")
