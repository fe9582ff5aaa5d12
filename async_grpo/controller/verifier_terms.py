"""The terms on which verifier pools serve together: equal rewards, and shares of the processes.

consumes:     the rewards that pools state when they register; the registered pools
produces:     the refusal of other rewards; each pool's number of processes
waits for:    a few seconds for conflicting pools to end: their dispatcher may have been killed
unblocked by: the end of these pools, or the deadline
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
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


@dataclass(slots=True, eq=False, kw_only=True)
class VerifierTerms:
    """Compares the rewards of a new pool with those in use; gives every pool its share."""

    pools: Callable[[], Sequence[Member]]  # the registered ones
    trainer: Callable[[], str]  # of the run; empty if there is none
    _rewards: Rewards | None = None  # of the first pool that was admitted
    _admitting: dict[str, WorkerInfo] = field(default_factory=dict)  # not members yet
    _shares: dict[str, int] = field(default_factory=dict)  # processes that a pool runs, by id
    _sending: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # of new shares, by id

    @asynccontextmanager
    async def admitted(self, info: WorkerInfo) -> AsyncIterator[None]:
        """Surrounds the registration of a worker; one without rewards has no terms to meet.

        Raises `ConfigError` if pools or a run use other rewards than this pool. The first pool
        fixes them, until neither a pool nor a run is left.
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
        infos = [*self._admitting.values(), *(pool.info for pool in self.pools())]
        owners = [*(info.owner for info in infos), self.trainer()]
        users = " and ".join(dict.fromkeys(filter(None, owners)))
        if self._rewards is not None and users:
            rewards.require_equal(self._rewards, users=users)

    def tell_shares(self) -> None:
        """Tell each pool how many processes it should run, if its share has changed."""
        pools = {pool.info.worker_id: pool for pool in self.pools()}
        stated = {n: (p.info.node_id, p.info.rewards) for n, p in pools.items() if p.info.rewards}
        shares = share_out(stated)
        for name, share in shares.items():
            if self._shares.get(name) != share and name not in self._sending:
                tell = self._tell(name, pools[name].handle, share)
                self._sending[name] = asyncio.create_task(tell, name=f"share-of-{name}")
        self._shares = {name: share for name, share in self._shares.items() if name in shares}

    async def _tell(self, name: str, handle: WorkerHandle, share: int) -> None:
        try:
            call = handle.take_share.remote(share)
            await handles.call(call, timeout_s=deadlines.SHARE_TAKEN_S, who=f"worker {name}")
            self._shares[name] = share
        except AsyncGrpoError as error:  # the next call tells it again, unless it is dead
            logger.warning("%s", error)
        finally:
            del self._sending[name]
