"""Finds the controller of a namespace; the first process that needs one makes it."""

from __future__ import annotations

import hashlib
import logging
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.cluster.handles import CONTROLLER, WHO
from async_grpo.util import deadlines
from async_grpo.util.errors import DeadlineError, ProcessLostError

if TYPE_CHECKING:
    from async_grpo.cluster.cluster import Cluster
    from async_grpo.cluster.handles import ControllerHandle

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.2


def find_or_make_controller(cluster: Cluster) -> ControllerHandle:
    """The handle of a controller that has just answered, and runs this package's code.

    Raises `ConfigError` if a controller of other code is in use, with the commands to stop.
    """
    deadline = time.monotonic() + deadlines.CONTROLLER_FOUND_S
    while True:
        controller = _named_controller(cluster)
        try:
            cluster.wait(
                controller.hello.remote(code_hash()),
                timeout_s=deadlines.CONTROLLER_SILENCE_S,
                who=WHO,
            )
        except DeadlineError:
            logger.warning(
                "%s has not answered for %g s and is ended", WHO, deadlines.CONTROLLER_SILENCE_S
            )
            cluster.end(controller)
        except ProcessLostError:  # it has ended: its name will be free in a moment
            if time.monotonic() > deadline:
                raise
        else:
            return controller
        time.sleep(POLL_INTERVAL_S)


@cache
def code_hash() -> str:
    """A hash of this package's source: processes of different code must not work together."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _named_controller(cluster: Cluster) -> ControllerHandle:
    """The controller's actor, which may still be starting, or may just have died."""
    from async_grpo.controller.controller import Controller

    actor = cluster.actor(
        Controller,
        name=CONTROLLER,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=0,  # a new process has lost all state: it must have another handle
        max_concurrency=100_000,  # ranks and environment workers have calls open at any time
        scheduling_strategy=cluster.on_head_node(),
    )
    controller: ControllerHandle = actor.remote(code_hash())
    return controller
