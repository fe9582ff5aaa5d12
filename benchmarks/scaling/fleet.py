"""The generation workers and the registries that lease them: real balancers, simulated engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from async_grpo.routing.balancer import Balancer, LeaseGrant
from async_grpo.types import WeightsVersion
from benchmarks.scaling.clock import Action, Actor, Clock
from benchmarks.scaling.engine import Engine
from benchmarks.scaling.scenario import Scenario

LEASE_CALLS = 3  # acquire, until_revoked, release
PING_INTERVAL_S = 5.0
PING_LUMPS = 10  # pings of a tenth of the workers are one call: their cost counts, not each event
Granted = Callable[[LeaseGrant], None]


@dataclass(slots=True)
class _Shard:
    """A registry, whose line is first come, first served."""

    actor: Actor
    balancer: Balancer = field(default_factory=Balancer)
    line: deque[tuple[int, WeightsVersion, Granted]] = field(default_factory=deque)


class Fleet:
    """Leases on engines; shard k has every `num_registries`-th engine."""

    def __init__(
        self, clock: Clock, scenario: Scenario, engines: list[Engine], registries: list[Actor]
    ) -> None:
        self._clock = clock
        self._scenario = scenario
        self.engines = engines
        self._shards = [_Shard(actor) for actor in registries]
        first = WeightsVersion(0, 0)
        for number in range(len(engines)):
            self._shard_of(number).balancer.add_worker(
                str(number),
                capacity=scenario.engine.capacity,
                overhead=scenario.overhead_seqs,
                version=first,
            )

    def acquire(self, ordinal: int, version: WeightsVersion, granted: Granted) -> None:
        """A lease for one question, at once or in its turn."""
        shard = self._shard_of(ordinal)
        num_samples = self._scenario.samples_per_question

        def ask() -> None:
            shard.line.append((num_samples, version, granted))
            self._serve(shard)

        shard.actor.call(self._scenario.control.registry_call_s, ask)

    def release(self, ordinal: int, lease_id: int, done: Action) -> None:
        """The lease is returned, and whoever waits for it served."""
        shard = self._shard_of(ordinal)

        def released() -> None:
            shard.balancer.release(lease_id)
            self._serve(shard)
            done()

        calls = LEASE_CALLS - 1
        shard.actor.call(calls * self._scenario.control.registry_call_s, released)

    def update(self, version: WeightsVersion, done: Action) -> None:
        """Every engine loads new weights; `done` when the registries have heard of all."""
        load_s = self._scenario.sync.load_s
        for engine in self.engines:
            engine.update(load_s)
        num_left = len(self._shards)

        def heard(shard: _Shard) -> None:
            nonlocal num_left
            for load in shard.balancer.loads():
                shard.balancer.set_version(load.worker_id, version)
            self._serve(shard)
            num_left -= 1
            if not num_left:
                done()

        def loaded() -> None:
            share = len(self.engines) / len(self._shards)
            seconds = share * self._scenario.control.registry_call_s
            for shard in self._shards:
                shard.actor.call(seconds, lambda shard=shard: heard(shard))  # type: ignore[misc]

        self._clock.after(load_s, loaded)

    def keep_pinging(self, while_running: Callable[[], bool]) -> None:
        """The registries' heartbeats, in lumps."""
        seconds = self._scenario.control.ping_s * len(self.engines) / PING_LUMPS
        if not seconds or not while_running():
            return
        for shard in self._shards:
            shard.actor.call(seconds / len(self._shards), lambda: None)
        self._clock.after(PING_INTERVAL_S / PING_LUMPS, lambda: self.keep_pinging(while_running))

    def _serve(self, shard: _Shard) -> None:
        # Slots are admitted when their weights are served, so the first in line speaks for all.
        while shard.line:
            cost, version, granted = shard.line[0]
            grant = shard.balancer.try_acquire(cost, version)
            if grant is None:
                return
            shard.line.popleft()
            granted(grant)

    def _shard_of(self, number: int) -> _Shard:
        return self._shards[number % len(self._shards)]
