"""A dispatcher's fleet on a real Ray: processes are killed and frozen, and come back."""

import asyncio
import os
import signal
import tempfile
import time

import pytest
import ray

from async_grpo import cluster
from async_grpo.cli import launch
from async_grpo.cli.fleet import Fleet
from async_grpo.config.worker import WorkerConfig
from async_grpo.types import Pulse, WeightsAck, WeightsSnapshot, WeightsVersion, WorkerInfo

pytestmark = pytest.mark.integration
TIMEOUT_S = 120.0
LEASE_S = 2.0
VERSION = WeightsVersion(1, 0)


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="f-") as folder:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local",
            namespace="fleet",
            num_cpus=4,
            object_store_memory=100 << 20,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        yield
        ray.shutdown()


def worker_class():
    class LightWorker:  # local: Ray then sends its code, instead of a name that it cannot import
        def __init__(self, name):
            self._name = name
            self._calls = []

        async def info(self):
            return WorkerInfo(
                self._name, "logprob", "", os.getpid(), "", 8, 4.0, 0.0, 8, lease_s=LEASE_S
            )

        async def ping(self, after_s):
            await asyncio.sleep(after_s)
            return Pulse("none")

        async def load_weights(self, snapshot):
            self._calls.append(str(snapshot.version))
            return WeightsAck(self._name, snapshot.version, 0.0, 0.0)

        async def abort_all(self):
            self._calls.append("abort")

        async def calls(self):
            return self._calls

    return LightWorker


@pytest.fixture
def fleet(monkeypatch):
    def start_worker(_config, name):
        return ray.remote(worker_class()).options(num_cpus=1, max_concurrency=100).remote(name)

    monkeypatch.setattr(launch, "start_worker", start_worker)
    with Fleet(WorkerConfig(model_path="m", mode="logprob", num_workers=2)) as fleet:
        until(fleet, lambda: len(members()) == 2)
        yield fleet


def until(fleet, condition):
    """The fleet is looked after until it is so."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        fleet.check()
        time.sleep(0.1)


def registry():
    return cluster.find_actor(cluster.registry_name("logprob"))


def ask(method, *arguments):
    call = getattr(registry(), method).remote(*arguments)
    return cluster.wait(call, timeout_s=TIMEOUT_S, who="the registry")


def members():
    """Nobody, while there is no registry to ask."""
    try:
        return {info.worker_id: info for info in ask("members")}
    except (AttributeError, cluster.ProcessLostError):
        return {}


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_and_a_frozen_worker_are_replaced_and_then_the_registry(fleet):
    ask("publish", WeightsSnapshot(VERSION, ()), TIMEOUT_S)
    killed, frozen = first = members().values()
    leases = [ask("acquire", 1.0, VERSION, TIMEOUT_S) for _ in range(8)]
    ends = [registry().until_revoked.remote(lease.lease_id) for lease in leases]
    os.kill(frozen.pid, signal.SIGSTOP)
    os.kill(killed.pid, signal.SIGKILL)
    until(fleet, lambda: len(members().keys() - {info.worker_id for info in first}) == 2)
    told = [cluster.wait(end, timeout_s=TIMEOUT_S, who="the registry") for end in ends]
    assert sorted(reason.partition(":")[0] for reason in told) == ["died"] * 4 + ["silent"] * 4
    until(fleet, lambda: not is_running(frozen.pid))
    counts = ask("status").counts
    assert (counts["fenced: died"], counts["fenced: silent"], counts["registered"]) == (1, 1, 4)
    second = members()
    assert {ask("acquire", 1.0, VERSION, TIMEOUT_S).worker_id for _ in range(8)} == set(second)

    session = ask("session")
    os.kill(cluster.process_of(registry()), signal.SIGKILL)
    until(fleet, lambda: members() == second and ask("session") != session)
    ask("publish", WeightsSnapshot(VERSION, ()), TIMEOUT_S)
    lease = ask("acquire", 1.0, VERSION, TIMEOUT_S)
    calls = cluster.wait(lease.handle.calls.remote(), timeout_s=TIMEOUT_S, who="the worker")
    assert calls == ["1.0", "abort", "1.0"]  # the same process, whose old work has ended
    assert lease.lease_id > max(old.lease_id for old in leases)
