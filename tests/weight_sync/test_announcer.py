"""Weights stay announced, whatever happens to registries: fakes that are restarted and moved."""

import threading
from types import SimpleNamespace

import pytest

from async_grpo import cluster
from async_grpo.errors import DeadlineError, ProcessLostError
from async_grpo.types import PublishReport, WeightsAck, WeightsSnapshot, WeightsVersion
from async_grpo.weight_sync import announcer as module
from async_grpo.weight_sync.announcer import Announcer

FIRST, SECOND = (WeightsSnapshot(WeightsVersion(1, batches), ()) for batches in range(2))
LOST = ProcessLostError("the registry died")
ROLES = ("generation", "logprob")


class Registry:
    def __init__(self, session):
        self.number, self.told, self.failures = session, [], []
        self.session = SimpleNamespace(remote=self._session)
        self.publish = SimpleNamespace(remote=self._publish)

    def _session(self):
        return self.failures[0] if self.failures else self.number

    def _publish(self, snapshot, timeout_s):
        if self.failures:
            return self.failures.pop(0)
        self.told.append(snapshot.version.batches)
        acks = (WeightsAck("w", snapshot.version, 0.0, 0.0),)
        return PublishReport(snapshot.version, acks, {})


class Transport:
    def announce(self, snapshot, *, registries, timeout_s):
        calls = {role: r.publish.remote(snapshot, timeout_s) for role, r in registries.items()}
        return {role: cluster.wait(c, timeout_s=1, who=role) for role, c in calls.items()}


@pytest.fixture
def scene(monkeypatch):
    def wait(answer, *, timeout_s, who):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(cluster, "wait", wait)
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    scene = SimpleNamespace(registries={role: Registry(1) for role in ROLES})
    scene.found = {cluster.registry_name(role): r for role, r in scene.registries.items()}
    scene.announcer = Announcer(Transport(), scene.registries, find=scene.found.get)
    yield scene
    scene.announcer.close()


def test_a_registry_that_was_restarted_is_told_the_newest_weights_again(scene):
    generation, logprob = scene.registries.values()
    scene.announcer.announce(FIRST, roles=ROLES, timeout_s=60)
    scene.announcer.announce(SECOND, roles=("generation",), timeout_s=60)
    scene.announcer.look_after_once()
    assert (generation.told, logprob.told) == ([0, 1], [0])
    generation.number = 2
    scene.announcer.look_after_once()
    assert (generation.told, logprob.told) == ([0, 1, 1], [0])
    logprob.number = 5
    for _ in range(3):
        scene.announcer.look_after_once()
    assert (generation.told, logprob.told) == ([0, 1, 1], [0, 0])


def test_a_first_announcement_that_takes_long_is_made_once_and_without_a_warning(scene, caplog):
    """Loading a real model takes longer than the interval at which registries are looked after."""
    generation = scene.registries["generation"]
    answer_at_last, asked = threading.Event(), threading.Event()

    def session():
        if threading.current_thread() is not announcing:
            asked.set()
        return 7

    def publish(snapshot, timeout_s):
        assert answer_at_last.wait(20)
        return generation._publish(snapshot, timeout_s)

    generation.session.remote, generation.publish.remote = session, publish
    announcing = threading.Thread(
        target=lambda: scene.announcer.announce(FIRST, roles=("generation",), timeout_s=60)
    )
    announcing.start()
    scene.announcer.start()
    for _ in range(3):  # the registry hears all the time that the trainer lives
        asked.clear()
        assert asked.wait(20)
    answer_at_last.set()
    announcing.join(20)
    for _ in range(3):
        scene.announcer.look_after_once()
    assert generation.told == [0]
    assert caplog.messages == []


def test_a_registry_of_another_process_is_found_and_told(scene):
    scene.announcer.announce(FIRST, roles=ROLES, timeout_s=60)
    scene.registries["generation"].failures = [LOST]
    scene.announcer.look_after_once()  # nobody has its name yet but itself
    successor = scene.found["registry-generation"] = Registry(2)
    for _ in range(3):
        scene.announcer.look_after_once()
    assert successor.told == [0]


def test_a_registry_that_dies_during_an_announcement_hears_all_of_it_again(scene):
    generation = scene.registries["generation"]
    generation.failures = [LOST, LOST, LOST]
    answers = iter([1, LOST, 2, 2, 2, 2, 2])
    generation.session.remote = lambda: next(answers)
    reports = scene.announcer.announce(FIRST, roles=("generation",), timeout_s=60)
    assert generation.told == [0]
    assert len(reports["generation"].acks) == 1


def test_a_registry_that_stays_away_is_an_error_in_time(scene):
    scene.registries["generation"].failures = [LOST] * 1000
    with pytest.raises(ProcessLostError):
        scene.announcer.announce(FIRST, roles=("generation",), timeout_s=0.05)


def test_a_registry_that_is_slow_is_asked_again_later(scene):
    generation = scene.registries["generation"]
    scene.announcer.announce(FIRST, roles=("generation",), timeout_s=60)
    generation.session.remote = lambda: DeadlineError("the generation registry did not answer")
    scene.announcer.look_after_once()
    generation.session.remote = lambda: 9
    scene.announcer.look_after_once()
    assert generation.told == [0, 0]


def test_nothing_is_announced_before_the_first_weights_and_after_the_end(scene):
    scene.announcer.look_after_once()
    assert not scene.announcer.has_announced
    scene.announcer.start()
    scene.announcer.announce(FIRST, roles=("generation",), timeout_s=60)
    scene.announcer.close()
    scene.announcer._thread.join(20)
    assert not scene.announcer._thread.is_alive()
    assert scene.registries["generation"].told == [0]
