"""A dispatcher's workers on a real Ray: processes are killed and frozen, and come back."""

import asyncio
import os
import signal
import time

import pytest
import ray
from local_ray import local_ray

from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import CONTROLLER
from async_grpo.config.roles import REFERENCE
from async_grpo.config.worker_config import WorkerConfig
from async_grpo.launch.actors import WorkerKind
from async_grpo.launch.dispatcher import Workers
from async_grpo.types import Pulse, WeightsAck, WorkerInfo
from async_grpo.util.errors import ProcessLostError

pytestmark = pytest.mark.integration
TIMEOUT_S = 120.0
LEASE_S = 2.0


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with local_ray(num_cpus=4, namespace="workers"):
        yield


def worker_class():
    class LightWorker:  # local: Ray then sends its code, instead of a name that it cannot import
        def __init__(self, name):
            self._name = name
            self._calls = []

        async def info(self):
            return WorkerInfo(
                self._name, REFERENCE, "", os.getpid(), "", 8, 4.0, 0.0, 8, lease_s=LEASE_S
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
def workers():
    def start(name):
        return ray.remote(worker_class()).options(num_cpus=1, max_concurrency=100).remote(name)

    kinds = (WorkerKind(REFERENCE, 2, {"CPU": 1.0}, start),)
    config = WorkerConfig(model_path="m", mode="logprob", num_workers=2)
    with Workers(kinds, config, Cluster()) as workers:
        until(workers, lambda: len(members()) == 2)
        yield workers


def until(workers, condition):
    """The workers are looked after until it is so."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        workers.check()
        time.sleep(0.1)


def controller():
    return Cluster().find_actor(CONTROLLER)


def ask(method, *arguments):
    call = getattr(controller(), method).remote(*arguments)
    return Cluster().wait(call, timeout_s=TIMEOUT_S, who="the controller")


def members():
    """Nobody, while there is no controller to ask."""
    try:
        return {info.worker_id: info for info in ask("members", REFERENCE)}
    except (AttributeError, ProcessLostError):
        return {}


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_and_a_frozen_worker_are_replaced_and_then_the_controller(workers):
    killed, frozen = first = members().values()
    os.kill(frozen.pid, signal.SIGSTOP)
    os.kill(killed.pid, signal.SIGKILL)
    until(workers, lambda: len(members().keys() - {info.worker_id for info in first}) == 2)
    until(workers, lambda: not is_running(frozen.pid))
    counts = ask("counts", REFERENCE)
    assert (counts["fenced: died"], counts["fenced: silent"], counts["registered"]) == (1, 1, 4)
    second = members()

    old, killed_at = Cluster().process_of(controller()), time.monotonic()
    os.kill(old, signal.SIGKILL)
    until(workers, lambda: members() == second)
    assert Cluster().process_of(controller()) != old
    assert time.monotonic() - killed_at < 30.0
    for worker in workers._workers:  # the same processes, whose old work has ended
        calls = Cluster().wait(worker.handle.calls.remote(), timeout_s=TIMEOUT_S, who="the worker")
        assert calls == ["abort"]
