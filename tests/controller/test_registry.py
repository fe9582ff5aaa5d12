import asyncio
import tempfile
import time

import numpy as np
import pytest
import ray

from async_grpo import cluster
from async_grpo.controller.registry import WorkerRegistry
from async_grpo.errors import ClusterError, DeadlineError, WeightSyncError, WorkerError
from async_grpo.types import (
    Pulse,
    WeightsAck,
    WeightsBucket,
    WeightsSnapshot,
    WeightsVersion,
    WorkerInfo,
)

pytestmark = pytest.mark.integration
FIRST, SECOND = WeightsVersion(7, 0), WeightsVersion(7, 1)
NEXT_RUN = WeightsVersion(8, 0)
PING_INTERVAL_S = 0.2
NUM_BYTES = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="r-") as folder:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local",
            num_cpus=2,
            object_store_memory=100 << 20,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        yield
        ray.shutdown()


def get(reference):
    return cluster.wait(reference, timeout_s=60, who="the actor")


def worker_class():
    class FakeWorker:  # local: Ray then sends its code, instead of a name that it cannot import
        def __init__(self, fails_with):
            self._fails_with = fails_with
            self._calls = []

        async def load_weights(self, snapshot):
            if self._fails_with:
                raise WeightSyncError(self._fails_with)
            for bucket in snapshot.buckets:
                await cluster.fetch_bytes(bucket)
            self._calls.append(str(snapshot.version))
            return WeightsAck("", snapshot.version, 0.0, 0.0)

        async def abort_all(self):
            self._calls.append("abort")

        async def ping(self, after_s=0.0):
            await asyncio.sleep(after_s)
            return Pulse("none")

        async def calls(self):
            return self._calls

    return FakeWorker


def make_registry(**options):
    actor = ray.remote(WorkerRegistry).options(num_cpus=0, max_concurrency=1000)
    return actor.remote("generation", ping_interval_s=PING_INTERVAL_S, **options)


def join(registry, name, *, capacity=2.0, fails_with=""):
    actor = ray.remote(worker_class()).options(num_cpus=0, max_concurrency=1000)
    worker = actor.remote(fails_with)
    info = WorkerInfo(name, "generation", "node", 1, "model", 128, capacity, 0.0, 512)
    get(registry.register.remote(info, worker))
    return worker


def trainer_class():
    class Trainer:
        """Owns the bytes of the weights, which are lost with it."""

        def snapshot(self, version):
            data = ray.put(np.zeros(NUM_BYTES, dtype=np.uint8))
            bucket = WeightsBucket((), data, size_bytes=NUM_BYTES, checksum=0)
            return WeightsSnapshot(version, (bucket,))

    return Trainer


def make_trainer():
    return ray.remote(trainer_class()).options(num_cpus=0).remote()


def kill(trainer, snapshot):
    """End a trainer; its bytes outlive it for a moment, on the same machine."""
    ray.kill(trainer)

    def is_lost():
        try:
            get(snapshot.buckets[0].data)
        except ClusterError:
            return True
        return False

    wait_until(is_lost)


def publish(registry, version):
    return announce(registry, WeightsSnapshot(version, ()))


def announce(registry, snapshot):
    return get(registry.publish.remote(snapshot, 30.0))


def acquire(registry, version, *, cost=1.0, timeout_s=5.0):
    return registry.acquire.remote(cost, version, timeout_s)


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_that_cannot_load_is_fenced_and_the_others_serve():
    registry = make_registry()
    good, bad = join(registry, "good"), join(registry, "bad", fails_with="checksum 1, got 2")
    report = publish(registry, FIRST)
    assert [ack.version for ack in report.acks] == [FIRST]
    assert report.failures == {"bad": "checksum 1, got 2"}
    assert get(acquire(registry, FIRST)).worker_id == "good"
    assert [info.worker_id for info in get(registry.members.remote())] == ["good"]
    assert get(good.calls.remote()) == [str(FIRST)]
    with pytest.raises(WorkerError, match="died"):
        get(bad.ping.remote())


def test_a_late_joiner_serves_the_published_weights_before_its_first_lease():
    registry = make_registry()
    early = join(registry, "early", capacity=1.0)
    publish(registry, FIRST)
    publish(registry, SECOND)
    assert get(acquire(registry, SECOND)).worker_id == "early"
    late = join(registry, "late", capacity=1.0)
    assert get(late.calls.remote()) == [str(SECOND)]
    assert get(acquire(registry, SECOND)).worker_id == "late"
    assert get(early.calls.remote()) == [str(FIRST), str(SECOND)]


def test_who_waits_is_served_in_order_as_workers_become_free():
    registry = make_registry()
    join(registry, "one", capacity=1.0)
    publish(registry, FIRST)
    held = get(acquire(registry, FIRST))
    waiting = []
    for _ in range(3):  # calls that are under way together may overtake each other
        waiting.append(acquire(registry, FIRST, timeout_s=30.0))
        get(registry.members.remote())
    for reference in waiting:
        assert ray.wait([reference], timeout=0.05)[0] == []
        assert get(registry.release.remote(held.lease_id))
        held = get(reference)
    assert not get(registry.release.remote(held.lease_id + 1))


def test_waiting_without_weights_ends_with_the_first_snapshot():
    registry = make_registry()
    join(registry, "one")
    waiting = acquire(registry, FIRST, timeout_s=30.0)
    assert ray.wait([waiting], timeout=0.3)[0] == []
    publish(registry, FIRST)
    assert get(waiting).version == FIRST


def test_a_new_run_revokes_what_a_crashed_one_held():
    registry = make_registry()
    worker = join(registry, "one", capacity=1.0)
    publish(registry, FIRST)
    zombie = get(acquire(registry, FIRST))
    waiting = acquire(registry, FIRST, timeout_s=30.0)
    assert ray.wait([waiting], timeout=0.3)[0] == []
    get(registry.begin_run.remote())
    with pytest.raises(WorkerError, match="has ended"):
        get(waiting)
    assert not get(registry.release.remote(zombie.lease_id))
    with pytest.raises(DeadlineError, match="none yet"):
        get(acquire(registry, NEXT_RUN, timeout_s=0.2))
    publish(registry, NEXT_RUN)
    assert get(acquire(registry, NEXT_RUN)).worker_id == "one"
    assert get(worker.calls.remote()) == [str(FIRST), "abort", str(NEXT_RUN)]


def test_after_a_run_has_ended_a_newcomer_loads_nothing():
    registry = make_registry()
    join(registry, "early")
    publish(registry, FIRST)
    get(registry.end_run.remote())
    assert get(join(registry, "late").calls.remote()) == []


def test_weights_that_died_with_their_trainer_keep_no_newcomer_out():
    registry, trainer = make_registry(), make_trainer()
    early = join(registry, "early")
    snapshot = get(trainer.snapshot.remote(FIRST))
    announce(registry, snapshot)
    kill(trainer, snapshot)
    late = join(registry, "late")
    assert get(late.calls.remote()) == []
    assert len(get(registry.members.remote())) == 2
    successor = make_trainer()
    announce(registry, get(successor.snapshot.remote(NEXT_RUN)))
    assert get(late.calls.remote()) == [str(NEXT_RUN)]
    assert get(early.calls.remote()) == [str(FIRST), str(NEXT_RUN)]


def test_a_trainer_that_dies_while_it_publishes_costs_no_worker():
    registry, trainer = make_registry(), make_trainer()
    join(registry, "one")
    snapshot = get(trainer.snapshot.remote(FIRST))
    kill(trainer, snapshot)
    report = announce(registry, snapshot)
    assert (report.acks, set(report.failures)) == ((), {"one"})
    assert len(get(registry.members.remote())) == 1
    assert get(registry.fenced.remote()) == {}


def test_a_dead_worker_is_excluded_at_the_next_ping_and_others_take_its_place():
    registry = make_registry()
    doomed = join(registry, "doomed", capacity=1.0)
    publish(registry, FIRST)
    lost = get(acquire(registry, FIRST))
    waiting = acquire(registry, FIRST, timeout_s=30.0)
    ray.kill(doomed)
    wait_until(lambda: not get(registry.members.remote()))
    assert list(get(registry.fenced.remote())) == ["doomed"]
    assert not get(registry.release.remote(lost.lease_id))
    with pytest.raises(DeadlineError, match=r"none is registered \(excluded: doomed: .*died"):
        get(acquire(registry, FIRST, timeout_s=0.2))
    join(registry, "next")
    assert get(waiting).worker_id == "next"


def test_a_drained_worker_finishes_what_it_has():
    registry = make_registry()
    join(registry, "one")
    publish(registry, FIRST)
    lease = get(acquire(registry, FIRST))
    get(registry.drain.remote("one"))
    with pytest.raises(DeadlineError):
        get(acquire(registry, FIRST, timeout_s=0.2))
    assert get(registry.release.remote(lease.lease_id))


def test_a_registry_that_nobody_needs_ends_itself():
    registry = make_registry(idle_exit_s=1.0)
    get(registry.touch.remote())
    for _ in range(8):  # longer than it would idle
        time.sleep(0.2)
        get(registry.members.remote())

    def has_ended():
        try:
            get(registry.fenced.remote())  # the only question that does not keep it alive
        except WorkerError:
            return True
        return False

    wait_until(has_ended)
