"""An actor that all dispatchers share and none owns: found or made, kept alive, made again.

consumes:     its answers
produces:     signs of life for it; a successor when it has ended
waits for:    nothing: a question that is not answered yet is looked at again next time
unblocked by: Ray, which restarts a process that died; whoever comes first makes an actor anew
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from async_grpo import cluster
from async_grpo.errors import ClusterError, ProcessLostError

logger = logging.getLogger(__name__)
CALL_TIMEOUT_S = 60.0
FROZEN_S = 60.0  # of silence, after which its process is ended and started again


class SharedActor:
    """One question is under way at any time."""

    def __init__(
        self, who: str, handle: Any, *, make: Callable[[], Any], ask: Callable[[Any], Any]
    ) -> None:
        """`make` returns the actor of this name, old or new; `ask` begins a call of it."""
        self._who = who
        self._make = make
        self._ask = ask
        self._call: Any = None
        self._asked_at = 0.0
        self._is_lost = False
        self.handle = handle

    def keep(self, now_s: float) -> Any:
        """What it has answered since the last time; None when it has not."""
        if self._is_lost:  # a moment ago: had the cluster ended, nobody would ask again
            self.handle, self._is_lost = self._make(), False
        if self._call is None:
            self._call, self._asked_at = self._ask(self.handle), now_s
        if not cluster.is_ready(self._call):
            if now_s - self._asked_at > FROZEN_S:
                self._restart()
            return None
        call, self._call = self._call, None
        try:
            return cluster.wait(call, timeout_s=CALL_TIMEOUT_S, who=self._who)
        except (ProcessLostError, ClusterError) as error:
            logger.warning("%s; it is looked for again", error)
            self._is_lost = True
            return None

    def _restart(self) -> None:
        import ray

        logger.warning("%s has not answered for %g s and is restarted", self._who, FROZEN_S)
        ray.kill(self.handle, no_restart=False)
        self._call = None
