"""Ray's own memory monitor, told to kill at 2 % of the machine's memory."""

import asyncio

import pytest
import ray
from private_cluster import PrivateCluster, environment

from async_grpo.cluster.cluster import Cluster
from async_grpo.cluster.handles import RunClient
from async_grpo.training.stream import RankStream
from async_grpo.types import RunId
from async_grpo.util.errors import RunLost

pytestmark = [pytest.mark.integration, pytest.mark.slow]
KILLS = {"RAY_memory_usage_threshold": "0.02", "RAY_memory_monitor_refresh_ms": "3000"}


@pytest.fixture
def killing_cluster(monkeypatch):
    private = PrivateCluster(env=environment(**KILLS))
    monkeypatch.setenv("RAY_AUTH_MODE", environment()["RAY_AUTH_MODE"])
    try:
        Cluster.join(private.address, namespace="killed")
        yield
    finally:
        ray.shutdown()
        private.stop()


@ray.remote(num_cpus=0, max_concurrency=10)
class Controller:
    """Answers nothing until it is killed."""

    async def next_items(self, run, rank, index):
        await asyncio.sleep(600)

    async def hungry(self, run, index):
        pass


def test_a_controller_that_the_memory_monitor_kills_is_lost_for_that_reason(killing_cluster):
    stream = RankStream(
        RunClient(Cluster(), Controller.remote(), RunId(1, 1)), rank=0, stall_timeout_s=60
    )
    with pytest.raises(RunLost, match="killed due to the node running low on memory") as lost:
        next(stream)
    assert "docs.ray.io" not in str(lost.value)
