"""On which terms verifier pools serve together: equal rewards, and a share each of their number.

consumes:     what pools state when they register; who is a member
produces:     the refusal of other rewards; each pool's number of processes
waits for:    conflicting pools to be found dead, a few seconds: their dispatcher may just have been
              killed
unblocked by: their end, or the patience
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from async_grpo.cluster import handles
from async_grpo.controller.members import Member
from async_grpo.types import Rewards, WorkerInfo, share_out
from async_grpo.util import deadlines
from async_grpo.util.errors import AsyncGrpoError, ConfigError

if TYPE_CHECKING:
    from async_grpo.cluster.handles import WorkerHandle

logger = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.25
NUM_TRIES = round(deadlines.OTHER_REWARDS_GONE_S / POLL_INTERVAL_S) + 1


class VerifierTerms:
    """One a controller; it looks at who uses the rewards at the moment."""

    def __init__(
        self, *, pools: Callable[[], Sequence[Member]], trainer: Callable[[], str]
    ) -> None:
        """`pools` are the registered ones. `trainer`: of the run; empty when there is none."""
        self._pools = pools
        self._trainer = trainer
        self._rewards: Rewards | None = None  # of the first pool that was admitted
        self._admitting: dict[str, WorkerInfo] = {}  # not members yet
        self._told: dict[str, int] = {}  # processes, by worker id
        self._telling: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def admitted(self, info: WorkerInfo) -> AsyncIterator[None]:
        """Around the registration of a worker; nothing is asked of one without rewards.

        Raises `ConfigError` when others use other rewards than this pool. The first pool fixes
        them, until neither a pool nor a run is left.
        """
        if info.rewards is None:
            yield
            return
        for tries_left in reversed(range(NUM_TRIES)):
            try:
                self._require_equal(info.rewards)
                break
            except ConfigError:
                if not tries_left:
                    raise
            await asyncio.sleep(POLL_INTERVAL_S)
        self._rewards = info.rewards
        self._admitting[info.worker_id] = info
        try:
            yield
        finally:
            del self._admitting[info.worker_id]

    def _require_equal(self, rewards: Rewards) -> None:
        infos = [*self._admitting.values(), *(pool.info for pool in self._pools())]
        owners = [*(info.owner for info in infos), self._trainer()]
        users = " and ".join(dict.fromkeys(filter(None, owners)))
        if self._rewards is not None and users:
            rewards.require_equal(self._rewards, users=users)

    def tell_shares(self) -> None:
        """Tell each pool how many processes it should run, where that has changed."""
        pools = {pool.info.worker_id: pool for pool in self._pools()}
        stated = {n: (p.info.node_id, p.info.rewards) for n, p in pools.items() if p.info.rewards}
        shares = share_out(stated)
        for name, share in shares.items():
            if self._told.get(name) != share and name not in self._telling:
                tell = self._tell(name, pools[name].handle, share)
                self._telling[name] = asyncio.create_task(tell, name=f"share-of-{name}")
        self._told = {name: share for name, share in self._told.items() if name in shares}

    async def _tell(self, name: str, handle: WorkerHandle, share: int) -> None:
        try:
            call = handle.take_share.remote(share)
            await handles.call(call, timeout_s=deadlines.SHARE_TAKEN_S, who=f"worker {name}")
            self._told[name] = share
        except AsyncGrpoError as error:  # it is told again, unless it is found dead before
            logger.warning("%s", error)
        finally:
            del self._telling[name]
