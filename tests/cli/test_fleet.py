from types import SimpleNamespace

import pytest
import ray

from async_grpo import cluster
from async_grpo.cli import fleet as module
from async_grpo.cli import launch
from async_grpo.cli.fleet import Fleet
from async_grpo.config.worker import WorkerConfig
from async_grpo.errors import ClusterError, WorkerError


class FakeActor:
    """Answers every call with what it was given, and keeps a record."""

    def __init__(self, **answers):
        self._answers = answers
        self.calls = []

    def __getattr__(self, method):
        def remote(*arguments):
            self.calls.append((method, *arguments))
            return self._answers.get(method)

        return SimpleNamespace(remote=remote)


def fake_wait(reference, *, timeout_s, who):
    if isinstance(reference, Exception):
        raise reference
    return reference


@pytest.fixture
def scene(monkeypatch):
    """A node with 4 CPUs, a registry and a verifier pool, all of them fakes."""
    scene = SimpleNamespace(registry=FakeActor(fenced={}), pool=FakeActor(), killed=[], workers=[])
    scene.free = {"CPU": 4.0}
    monkeypatch.setattr(cluster, "wait", fake_wait)
    monkeypatch.setattr(cluster, "free_here", lambda: scene.free)
    monkeypatch.setattr(cluster, "resources_here", lambda: {"CPU": 4.0})
    monkeypatch.setattr(cluster, "logs_folder", lambda: "the logs")
    monkeypatch.setattr(launch, "make_registry", lambda _mode: scene.registry)
    monkeypatch.setattr(launch, "make_verifier_pool", lambda _config: scene.pool)
    monkeypatch.setattr(launch, "start_worker", lambda _config, _name: scene.workers.pop(0))
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray, "kill", scene.killed.append)
    monkeypatch.setattr(module, "ROOM_TIMEOUT_S", 0.0)
    return scene


def config(**options):
    return WorkerConfig(model_path="model", reward_fns="countdown", **options)


def test_workers_join_and_leave_with_their_dispatcher(scene):
    scene.workers = workers = [FakeActor(info="a's info"), FakeActor(info="b's info")]
    first, second = workers
    with Fleet(config(num_workers=2)) as fleet:
        fleet.start(["a", "b"])
        fleet.register("a")
        fleet.register("b")
        joined = [call for call in scene.registry.calls if call[0] == "register"]
        assert joined == [("register", "a's info", first), ("register", "b's info", second)]
    assert scene.registry.calls[-2:] == [("deregister", "a"), ("deregister", "b")]
    assert scene.killed == [first, second]


def test_what_workers_share_is_told_that_it_is_needed(scene):
    scene.workers = [FakeActor()]
    with Fleet(config()) as fleet:
        fleet.start(["a"])
        for _ in range(3):
            fleet.check()
    assert scene.pool.calls == [("touch",)] * 3
    assert scene.registry.calls.count(("touch",)) == 3


def test_the_death_of_the_verifier_pool_is_an_error(scene):
    scene.pool = FakeActor(touch=WorkerError("the verifier pool died"))
    with Fleet(config()) as fleet, pytest.raises(WorkerError, match="the verifier pool died"):
        fleet.check()


@pytest.mark.parametrize(
    ("fenced", "sentence"),
    [
        ({}, "worker a died: it crashed (its log is in the logs)"),
        ({"a": "checksum 1, got 2"}, "worker a was excluded: checksum 1, got 2 (its log is in the"),
    ],
)
def test_a_lost_worker_is_an_error_that_says_why(fenced, sentence, scene):
    scene.registry = FakeActor(fenced=fenced)
    scene.workers = [worker := FakeActor(ping=WorkerError("worker a died: it crashed"))]
    with pytest.raises(WorkerError) as caught, Fleet(config()) as fleet:
        fleet.start(["a"])
        fleet.check()
    assert str(caught.value).startswith(sentence)
    assert scene.killed == [worker]


def test_workers_without_room_are_refused_before_anything_is_made(scene):
    scene.free = {"CPU": 2.0}
    with pytest.raises(
        ClusterError, match=r"3 generation .* need 3 CPU .*, 2 of 4 are free: .*--nu"
    ):
        Fleet(config(num_workers=3)).__enter__()
    assert scene.registry.calls == scene.pool.calls == []
