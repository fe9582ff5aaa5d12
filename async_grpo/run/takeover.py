"""Takes the batcher's name, which is what keeps two runs from using the same workers.

consumes:     the name of an earlier run's batcher, when there is one
produces:     this run's batcher
waits for:    Ray to notice that an earlier trainer has died, unless this machine knows it better
unblocked by: the end of the earlier batcher
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

from async_grpo import cluster
from async_grpo.errors import ConfigError

logger = logging.getLogger(__name__)
T = TypeVar("T")
TAKEOVER_TIMEOUT_S = 10.0  # in which Ray notices that a trainer on another machine has died
POLL_INTERVAL_S = 0.1


def take_name(make: Callable[[], T]) -> T:
    """What `make` makes; it raises `ValueError` as long as the name is taken.

    Raises `ConfigError` when the trainer that has the name lives. A batcher whose trainer was
    killed on this machine is ended here, at once: a restarted rank 0 waits for nobody. So is an
    earlier one of this process, whose name Ray keeps even when its process has died.
    """
    deadline = time.monotonic() + TAKEOVER_TIMEOUT_S
    while True:
        try:
            return make()
        except ValueError as error:
            owner = cluster.owner_of(cluster.BATCHER)
            if owner is not None and owner.is_here and _is_over(owner.pid):
                _end_batcher()
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"another trainer{_who(owner)} uses these workers: wait for it, or start "
                    "workers and trainer with another --namespace, the trainer with another "
                    "--output-dir too"
                ) from error
        time.sleep(POLL_INTERVAL_S)


def _end_batcher() -> None:
    import ray
    from ray.exceptions import RayError

    batcher = cluster.find_actor(cluster.BATCHER)
    if batcher is not None:
        logger.info("the batcher of an earlier trainer is ended")
        with contextlib.suppress(RayError):
            ray.kill(batcher)


def _is_over(pid: int) -> bool:
    """Whether the run of a trainer process is; one that waits for its parent to look has died."""
    if pid == os.getpid():
        return True
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _who(owner: cluster.Owner | None) -> str:
    return f" (process {owner.pid} on {owner.address})" if owner else ""
