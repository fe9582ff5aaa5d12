"""Ray's own memory monitor, told to kill at 2 % of the machine's memory."""

import asyncio
from types import SimpleNamespace

import pytest
import ray
from private_cluster import PrivateCluster, environment

from async_grpo import cluster
from async_grpo.errors import BatcherLostError
from async_grpo.run.recovery import BatcherKeeper
from async_grpo.training.stream import RankStream

pytestmark = [pytest.mark.integration, pytest.mark.slow]
KILLS = {"RAY_memory_usage_threshold": "0.02", "RAY_memory_monitor_refresh_ms": "3000"}


@pytest.fixture
def killing_cluster(monkeypatch):
    private = PrivateCluster(env=environment(**KILLS))
    monkeypatch.setenv("RAY_AUTH_MODE", environment()["RAY_AUTH_MODE"])
    try:
        cluster.connect(private.address, namespace="killed")
        yield
    finally:
        ray.shutdown()
        private.stop()


@ray.remote(num_cpus=0, max_concurrency=10)
class Batcher:
    """The first one answers nothing until it is killed, those after it do at once."""

    def __init__(self, *, answers):
        self.answers = answers

    async def next_item(self, rank, index):
        await self.evaluate()

    async def hungry(self, rank, index):
        pass

    async def evaluate(self):
        if not self.answers:
            await asyncio.sleep(600)
        return "evaluated"


def test_a_batcher_that_the_memory_monitor_kills_is_made_anew(killing_cluster, caplog):
    first = Batcher.remote(answers=False)
    run = SimpleNamespace(batcher=first)
    run.restart_batcher = lambda _: setattr(run, "batcher", Batcher.remote(answers=True))
    sync = SimpleNamespace(wait=lambda: None, tell_batcher=lambda: None)
    keeper = BatcherKeeper(run, sync, lambda: None)
    with pytest.raises(BatcherLostError, match="killed due to the node running low on memory"):
        next(RankStream(first, rank=0, stall_timeout_s=60))
    answer = keeper.ask("evaluate", timeout_s=60, who="the experience batcher")
    assert answer == "evaluated"
    assert run.batcher is not first
    assert "running low on memory" in caplog.text
    assert "docs.ray.io" not in caplog.text
