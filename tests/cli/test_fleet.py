"""A dispatcher's workers, on a node of fakes: started, admitted, lost, replaced, drained."""

import logging
import os
from datetime import datetime
from types import SimpleNamespace

import pytest
import ray

from async_grpo import cluster
from async_grpo.cli import fleet as module
from async_grpo.cli import launch
from async_grpo.cli.fleet import Fleet
from async_grpo.cli.seat import PLACEMENT_TIMEOUT_S
from async_grpo.cli.shared_actor import FROZEN_S
from async_grpo.config.worker import WorkerConfig
from async_grpo.errors import (
    ClusterError,
    ConfigError,
    ProcessLostError,
    WeightSyncError,
    WorkerError,
)
from async_grpo.types import Standing

PENDING = object()  # what a call that is not answered yet has for an answer
LOST = ProcessLostError("it died")


class FakeActor:
    """Answers every call with what it was given, and keeps a record."""

    def __init__(self, **answers):
        self.answers = answers
        self.calls = []

    def __getattr__(self, method):
        def remote(*arguments):
            self.calls.append((method, *arguments))
            answer = self.answers.get(method)
            return answer(*arguments) if callable(answer) else answer

        return SimpleNamespace(remote=remote)


class Registry(FakeActor):
    """Admits and remembers, as long as it is the same one."""

    def __init__(self, **answers):
        self.admitted, self.excluded, self.leases = [], {}, 0
        self.run = 0
        super().__init__(**{"standing": self._standing, "register": self._register, **answers})

    def _register(self, info, handle):
        self.admitted.append(info.worker_id)

    def _standing(self, names):
        return {
            name: Standing(
                name in self.admitted and name not in self.excluded,
                self.leases,
                self.excluded.get(name, ""),
                self.run,
            )
            for name in names
        }


class Scene:
    """A node with 4 CPUs, in which a worker says little of itself."""

    def __init__(self):
        self.registry, self.pool = Registry(), FakeActor(join="")
        self.killed, self.workers, self.said = [], {}, []
        self.free = {"CPU": 4.0}
        self.now_s = 1000.0
        self.num_pools = self.num_registries = 0
        self.answers = {}  # of workers that are started from now on
        self.first_answers = {}  # of the very first

    def start_worker(self, _config, name):
        answers = self.answers if self.workers else self.first_answers or self.answers
        info = SimpleNamespace(worker_id=name, startup=(("importing", 8.25),))
        self.workers[name] = FakeActor(**{"info": info, **answers})
        return self.workers[name]

    def make_registry(self, _mode):
        self.num_registries += 1
        return self.registry

    def find_pool(self):
        self.num_pools += 1
        return self.pool

    def pass_time(self, fleet, seconds):
        for _ in range(int(seconds)):
            self.now_s += 1.0
            fleet.check()

    @property
    def names(self):
        return list(self.workers)


def fake_wait(reference, *, timeout_s, who):
    assert reference is not PENDING
    if isinstance(reference, Exception):
        raise reference
    return reference


@pytest.fixture
def scene(monkeypatch, tmp_path):
    scene = Scene()
    monkeypatch.setattr(cluster, "wait", fake_wait)
    monkeypatch.setattr(cluster, "is_ready", lambda reference: reference is not PENDING)
    monkeypatch.setattr(cluster, "process_of", lambda _handle: 77)
    monkeypatch.setattr(cluster, "free_here", lambda: scene.free)
    monkeypatch.setattr(cluster, "resources_here", lambda: {"CPU": 4.0})
    monkeypatch.setattr(cluster, "logs_folder", lambda: str(tmp_path))
    monkeypatch.setattr(launch, "make_registry", scene.make_registry)
    monkeypatch.setattr(launch.VerifierPools, "make", lambda _self: scene.pool)
    monkeypatch.setattr(launch.VerifierPools, "find", lambda _self: scene.find_pool())
    monkeypatch.setattr(launch, "start_worker", scene.start_worker)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray, "kill", lambda handle, **_: scene.killed.append(handle))
    monkeypatch.setattr(module, "ROOM_TIMEOUT_S", 0.0)
    clock = SimpleNamespace(
        monotonic=lambda: scene.now_s, sleep=lambda s: setattr(scene, "now_s", scene.now_s + s)
    )
    monkeypatch.setattr(module, "time", clock)
    return scene


def make_fleet(scene, **options):
    config = WorkerConfig(model_path="model", reward_fns="countdown", **options)
    return Fleet(config, say=scene.said.append)


def test_workers_join_and_leave_with_their_dispatcher(scene):
    with make_fleet(scene, num_workers=2) as fleet:
        scene.pass_time(fleet, 4)
        a, b = scene.names
        assert scene.registry.admitted == [a, b]
        assert scene.said == [f"worker {a} registered", f"worker {b} registered"]
    assert scene.registry.calls[-2:] == [("deregister", a), ("deregister", b)]
    assert scene.killed == list(scene.workers.values())


def test_workers_load_while_the_verifiers_start_and_end_when_those_cannot(scene, monkeypatch):
    def make_pool(_self):
        assert len(scene.workers) == 2
        raise ClusterError("no adapter")

    monkeypatch.setattr(launch.VerifierPools, "make", make_pool)
    with pytest.raises(ClusterError, match="no adapter"):
        make_fleet(scene, num_workers=2).__enter__()
    assert scene.killed == list(scene.workers.values()) != []


def test_how_long_a_worker_took_and_for_what_is_told(scene, caplog):
    caplog.set_level(logging.INFO, logger="async_grpo")
    with make_fleet(scene) as fleet:
        scene.pass_time(fleet, 4)
        (name,) = scene.names
    assert f"worker {name} is ready after 1.0 s: 8.2 s importing" in caplog.messages


def test_a_worker_that_loads_holds_up_no_other(scene):
    scene.first_answers = {"info": PENDING}
    with make_fleet(scene, num_workers=2) as fleet:
        scene.pass_time(fleet, 5)
        _, quick = scene.names
        assert scene.said == [f"worker {quick} registered"]


def test_what_workers_share_is_told_that_it_is_needed_and_when_no_more(scene):
    with make_fleet(scene) as fleet:
        scene.pass_time(fleet, 3)
    assert [call[0] for call in scene.pool.calls] == ["join"] * 3 + ["leave"]
    assert {call[1].pid for call in scene.pool.calls} == {os.getpid()}
    assert [call[0] for call in scene.registry.calls].count("standing") == 3


def test_a_dispatcher_says_when_a_run_begins_and_ends(scene):
    with make_fleet(scene) as fleet:
        scene.pass_time(fleet, 4)
        first, second = 1_700_000_000_000, 1_700_000_005_000  # milliseconds, five seconds apart
        num_said = len(scene.said)
        for scene.registry.run in (first, second, 0):
            scene.pass_time(fleet, 3)
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
    with make_fleet(scene, num_workers=2) as fleet:
        scene.pass_time(fleet, 4)
        lost, other = scene.names
        scene.registry.excluded[lost] = reason
        scene.pass_time(fleet, 1)
        assert scene.killed == [scene.workers[lost]]
        assert f"{reason}; another is started in 1 s, restart 1 of at most 5" in caplog.text
        scene.pass_time(fleet, 5)
        third = scene.names[-1]
        assert scene.names == [lost, other, third]
        assert scene.registry.admitted == [lost, other, third]
        assert scene.said[-1] == f"worker {third} registered"


def test_a_worker_that_is_lost_too_often_ends_the_dispatcher_with_the_cause(scene):
    with make_fleet(scene, max_restarts=2) as fleet:
        for number in range(3):
            scene.pass_time(fleet, 8)
            assert len(scene.names) == number + 1
            scene.registry.excluded[scene.names[-1]] = "its engine has died"
            if number < 2:
                scene.pass_time(fleet, 1 + number)
                assert len(scene.names) == number + 1, "started before its pause of 1 or 2 s"
        with pytest.raises(
            WorkerError, match=r"^its engine has died; .* than --max-restarts 2 losses within an h"
        ):
            scene.pass_time(fleet, 1)


@pytest.mark.parametrize("when", ["info", "register"])
def test_a_worker_that_cannot_start_ends_the_dispatcher_at_once(when, scene, tmp_path):
    (tmp_path / "worker-ab-01-77.err").write_text("ValueError: no room\nRuntimeError: it died\n")
    if when == "info":
        scene.answers = {"info": LOST}
    else:
        scene.registry.answers["register"] = WeightSyncError("it died")
    with (
        pytest.raises(WorkerError, match=r"^it died: ValueError: no room \(all of it in .*77.err"),
        make_fleet(scene) as fleet,
    ):
        scene.pass_time(fleet, 3)
    assert len(scene.names) == 1


def test_a_successor_that_cannot_start_is_tried_again(scene):
    with make_fleet(scene) as fleet:
        scene.pass_time(fleet, 3)
        scene.answers = {"info": LOST}
        scene.registry.excluded[scene.names[0]] = "its engine has died"
        scene.pass_time(fleet, 3)
        scene.answers = {}
        scene.pass_time(fleet, 6)
        assert len(scene.names) == 3
        assert scene.registry.admitted == [scene.names[0], scene.names[2]]


def test_a_registry_that_has_forgotten_its_workers_gets_them_again(scene):
    with make_fleet(scene) as fleet:
        scene.pass_time(fleet, 3)
        (name,) = scene.names
        scene.registry.answers["standing"] = LOST
        scene.pass_time(fleet, 1)
        scene.registry = Registry()
        scene.pass_time(fleet, 4)
        assert scene.num_registries == 2
        assert scene.registry.admitted == scene.names == [name]
        assert ("abort_all",) in scene.workers[name].calls
        assert scene.said == [f"worker {name} registered", f"worker {name} registered again"]
        assert scene.killed == []


def test_a_registry_that_dies_while_a_worker_registers_costs_nothing(scene):
    scene.registry.answers["register"] = LOST
    with make_fleet(scene) as fleet:
        scene.pass_time(fleet, 2)
        scene.registry.answers["register"] = scene.registry._register
        scene.pass_time(fleet, 4)
        assert scene.registry.admitted == scene.names
        assert len(scene.names) == 1


def test_a_registry_that_does_not_answer_is_restarted(scene):
    with make_fleet(scene) as fleet:
        scene.pass_time(fleet, 3)
        scene.registry.answers["standing"] = PENDING
        scene.pass_time(fleet, FROZEN_S - 2)
        assert scene.killed == []
        scene.pass_time(fleet, 4)
        assert scene.killed == [scene.registry]


def test_a_verifier_pool_that_was_lost_is_made_again(scene):
    with make_fleet(scene) as fleet:
        scene.pass_time(fleet, 2)
        scene.pool = FakeActor(join="")
        fleet._verifiers.handle.answers["join"] = LOST
        scene.pass_time(fleet, 3)
        assert scene.num_pools == 1
        assert scene.pool.calls


def test_what_the_verifier_pool_complains_of_stands_on_the_console(scene, caplog):
    scene.pool = FakeActor(join="the disk is full")
    with make_fleet(scene) as fleet:
        scene.pass_time(fleet, 1)
    assert "the disk is full" in caplog.messages


def test_a_pool_that_others_have_made_with_other_rewards_ends_the_dispatcher(scene):
    """Ray has lost the pool, and somebody was quicker than this dispatcher to make another."""
    scene.pool = FakeActor(join=ConfigError("while dispatcher process 7 on box uses others"))
    with pytest.raises(ConfigError, match="process 7"), make_fleet(scene) as fleet:
        scene.pass_time(fleet, 1)


def test_a_worker_for_which_ray_has_no_place_is_an_error_soon(scene, monkeypatch):
    monkeypatch.setattr(cluster, "process_of", lambda _handle: 0)
    scene.answers = {"info": PENDING}
    with make_fleet(scene) as fleet:
        scene.pass_time(fleet, PLACEMENT_TIMEOUT_S)
        with pytest.raises(ClusterError, match=r"no place for worker generation-.*its CPUs"):
            scene.pass_time(fleet, 3)


def test_a_drain_waits_for_what_runs_but_not_for_ever(scene):
    with make_fleet(scene) as fleet:
        scene.pass_time(fleet, 3)
        (name,) = scene.names
        fleet.drain(timeout_s=30.0)
        assert ("drain", name) in scene.registry.calls
        assert scene.now_s == 1003.0
        scene.registry.leases = 2
        fleet.drain(timeout_s=30.0)
        assert 1033.0 <= scene.now_s <= 1034.0
        assert scene.said[-1] == "finishing what runs, for at most 30 s; once more: at once"


def test_workers_without_room_are_refused_before_anything_is_made(scene):
    scene.free = {"CPU": 2.0}
    with pytest.raises(
        ClusterError, match=r"3 generation .* need 3 CPU .*, 2 of 4 are free: .*--nu"
    ):
        make_fleet(scene, num_workers=3).__enter__()
    assert scene.registry.calls == scene.pool.calls == []


@pytest.fixture(autouse=True)
def heard(caplog):
    caplog.set_level(logging.INFO, logger="async_grpo")
