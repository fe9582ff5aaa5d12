"""What episodes ask of the controller: each call leases a worker there, and brings its answer."""

from __future__ import annotations

from functools import partial
from typing import Any

from async_grpo import cluster
from async_grpo.environments.play import Ask
from async_grpo.errors import ProcessLostError
from async_grpo.types import EpisodesRequest


def ask_controller(played: EpisodesRequest) -> Ask:
    """How the episodes of one request ask; whatever they ask for ends with its lease."""
    return partial(_ask, played)


async def _ask(
    played: EpisodesRequest, role: str, method: str, request: Any, **options: Any
) -> Any:
    controller = cluster.find_actor(cluster.CONTROLLER)
    if controller is None:
        raise ProcessLostError("the controller has ended: its run goes on with another one")
    answer = controller.ask.remote(
        played.run, role, method, request, owner=played.lease_id, **options
    )
    # The controller ends what stalls, and with it this call.
    return await cluster.work(answer, timeout_s=None, who="the controller")
