"""What episodes ask of the controller, which leases a worker, and brings its answer."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from async_grpo.cluster import cluster
from async_grpo.types import EpisodesRequest, RunId
from async_grpo.util.errors import ProcessLostError


async def ask(played: EpisodesRequest, role: str, method: str, request: Any, **options: Any) -> Any:
    """The answer of a worker of `role`; whatever the episodes ask for ends with their lease."""
    answer = _controller_of(played.run).ask.remote(
        played.run, role, method, request, owner=played.lease_id, **options
    )
    # The controller ends what stalls, and with it this call.
    return await cluster.work(answer, timeout_s=None, who="the controller")


@lru_cache(maxsize=1)
def _controller_of(run: RunId) -> Any:
    """Found once an epoch, which ends with its controller: all episodes wait while Ray looks."""
    controller = cluster.find_actor(cluster.CONTROLLER)
    if controller is None:
        raise ProcessLostError("the controller has ended: its run goes on with another one")
    return controller
