"""Grading behind fork servers: whatever a text or an adapter does, grading goes on.

group --requests of an adapter--> fork server --> outcomes, accidents tried again--> best verdicts
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from async_grpo.config.worker_config import refuse_switches
from async_grpo.types import Verdict
from async_grpo.util.errors import ConfigError
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.server import GraderServer
from async_grpo.verification.tasks import Outcome, Sample
from async_grpo.verification.verdict import best_verdict, is_settled, settle

PATIENCE_S = 0.5  # a request that takes longer makes room for another
PIECE_S = 2.0  # of a group's samples in one process, about; a slow adapter's go side by side
MAX_PIECE = 64
MAX_LATE = 2  # such requests at a time, for each process of the configuration


class Sandbox:
    """Grades samples with every adapter of the configuration, `num_processes` requests at a time.

    A request that is not done after `PATIENCE_S` does not count any more, though it goes on until
    its time is up: what hangs delays nobody else.

    `events` counts what went wrong since the start, by kind: outcomes that are accidents,
    `retried`, `late` requests, `server_restarts`.
    """

    def __init__(self, config: VerifierConfig, *, num_processes: int) -> None:
        self._config = config
        self.num_processes = num_processes
        self._servers: dict[str, GraderServer] = {}  # by adapter
        self._places = asyncio.Semaphore(num_processes)
        self._late_places = asyncio.Semaphore(num_processes * (1 + MAX_LATE))
        self._controls: dict[str, Sample] = {}  # by adapter, the first sample it graded
        self._seconds: dict[str, float] = {}  # by adapter, of a sample, lately
        self.events: Counter[str] = Counter()

    @property
    def confinement(self) -> dict[str, str]:
        """Why each kind of what it runs is not confined; empty texts: it is."""
        servers = {*self._servers.values()}
        return {what: why for each in servers for what, why in each.confinement.items()}

    @property
    def groupwise(self) -> tuple[str, ...]:
        """The adapters that grade all samples of a question in one call, and alone."""
        return tuple(name for name, server in self._servers.items() if name in server.groupwise)

    async def start(self) -> None:
        """Start the servers.

        Raises `ConfigError` when the adapters cannot be imported, or must be confined and cannot.
        """
        refuse_switches()
        names = self._config.reward_names
        if of_registry := tuple(name for name in names if ":" not in name):
            await self._start_shipped(of_registry)
        if others := tuple(name for name in names if name not in self._servers):
            server = await self._make_server(others, shipped=False)
            await server.start()
            self._servers |= dict.fromkeys(others, server)

    async def _start_shipped(self, names: tuple[str, ...]) -> None:
        """Start the server of our own graders; which rewards those are, its registry says."""
        server = await self._make_server(names, shipped=True)
        try:
            await server.start()
        except ConfigError:  # a user's registry that needs the network, or is wrong in any case
            return
        self._servers |= dict.fromkeys(server.shipped, server)
        if not server.shipped:
            server.close()

    async def _make_server(self, names: tuple[str, ...], *, shipped: bool) -> GraderServer:
        """One of these adapters; raises `ConfigError` where it must be confined and cannot be."""
        config = replace(self._config, reward_names=names)
        # In a thread, for it tries the confinement.
        return await asyncio.to_thread(GraderServer, config, shipped=shipped, events=self.events)

    async def resize(self, num_processes: int) -> None:
        """Grade in so many processes from now on; what runs is not disturbed."""
        change = num_processes - self.num_processes
        self.num_processes = num_processes
        for places, each in ((self._places, 1), (self._late_places, 1 + MAX_LATE)):
            for _ in range(change * each):
                places.release()
            for _ in range(-change * each):
                await places.acquire()

    async def grade(
        self, samples: Sequence[Sample], names: Sequence[str] = ()
    ) -> tuple[Verdict, ...]:
        """Run these adapters, or all but groupwise ones, on samples of one group.

        The best verdict of each sample.
        """
        started = time.perf_counter()
        outcomes = await self._outcomes(samples, names)
        seconds = time.perf_counter() - started
        return tuple(best_verdict(each, seconds=seconds) for each in zip(*outcomes, strict=True))

    async def grade_with_each(
        self, sample: Sample, names: Sequence[str] = ()
    ) -> tuple[Verdict, ...]:
        """The verdict of each of these adapters, or of all, alone.

        Raises `ConfigError` for a groupwise one beside others: what of a group has to be graded
        again, others grade without the rest of it.
        """
        asked = names or self._config.reward_names
        groupwise = [name for name in asked if name in self.groupwise]
        if groupwise and len(asked) > 1:
            raise ConfigError(
                f"a groupwise reward must grade its questions alone, got {','.join(asked)}: give "
                f"{groupwise[0]} to the verifiers alone, or to a type of --data by rewards="
            )
        outcomes = await self._outcomes([sample], names)
        return tuple(best_verdict(of_one, seconds=0.0) for of_one in outcomes)

    async def close(self) -> None:
        """End every process; nothing can be graded afterwards."""
        for server in set(self._servers.values()):
            server.close()

    async def _outcomes(
        self, samples: Sequence[Sample], names: Sequence[str]
    ) -> list[list[Outcome]]:
        """By adapter, and sample; without `names`, of all that grade beside others, if any do."""
        every = self._config.reward_names
        asked = names or [name for name in every if name not in self.groupwise] or every
        return await asyncio.gather(*(self._grade_with(name, samples) for name in asked))

    async def _grade_with(self, name: str, samples: Sequence[Sample]) -> list[Outcome]:
        """Pieces of the group side by side, then again what has failed, each sample alone."""
        if name in self._servers[name].groupwise:
            return await self._grade_together(name, samples)
        size = self._piece(name)
        pieces = [samples[start : start + size] for start in range(0, len(samples), size)]
        graded = await asyncio.gather(*(self._first_attempts(name, piece) for piece in pieces))
        outcomes = [outcome for of_piece in graded for outcome in of_piece]
        failed = [n for n, outcome in enumerate(outcomes) if not outcome.is_graded]
        again = (self._settled(name, samples[n], outcomes[n]) for n in failed)
        for n, outcome in zip(failed, await asyncio.gather(*again), strict=True):
            outcomes[n] = outcome
        return outcomes

    async def _grade_together(self, name: str, samples: Sequence[Sample]) -> list[Outcome]:
        """All samples in one call of the adapter, which fails for all of them."""
        attempts: list[Outcome] = []
        while not is_settled(attempts):
            self.events["retried"] += bool(attempts)
            outcomes = await self._ask(name, samples)
            failed = [outcome for outcome in outcomes if not outcome.is_graded]
            if not failed and len(outcomes) == len(samples):
                return outcomes
            short = Outcome(name, "error", reason="its process ended too early", cause="end")
            attempts.append((*failed, short)[0])
        return [settle(attempts)] * len(samples)

    def _piece(self, name: str) -> int:
        """Samples for one process: many of a quick adapter, one of a slow one."""
        return max(1, min(MAX_PIECE, int(PIECE_S / self._seconds.get(name, 1e-3))))

    async def _first_attempts(self, name: str, samples: Sequence[Sample]) -> list[Outcome]:
        """What ends its process counts as the first attempt; a fresh one grades those after it."""
        outcomes: list[Outcome] = []
        while len(outcomes) < len(samples):
            started = time.perf_counter()
            done = await self._ask(name, samples[len(outcomes) :])
            outcomes += done
            seconds = (time.perf_counter() - started) / len(done)
            self._seconds[name] = (self._seconds.get(name, seconds) + seconds) / 2
        return outcomes

    async def _settled(self, name: str, sample: Sample, first: Outcome) -> Outcome:
        attempts = [first]
        while not is_settled(attempts):
            self.events["retried"] += 1
            has_overrun = any(attempt.status == "overrun" for attempt in attempts)
            control = self._controls.get(name) if has_overrun else None
            attempts.append(await self._attempt(name, sample, control))
        return settle(attempts)

    async def _attempt(self, name: str, sample: Sample, control: Sample | None) -> Outcome:
        """One outcome; with a control, which the adapter has graded before, that is graded first.

        When it fails now, the sample is not to blame.
        """
        if control is not None:
            (outcome,) = await self._ask(name, [control])
            if not outcome.is_graded:
                reason = f"{outcome.reason}, on a sample that it has graded before"
                status: Literal["lost", "error"] = "lost" if outcome.status == "lost" else "error"
                return replace(outcome, status=status, reason=reason)
        (outcome,) = await self._ask(name, [sample])
        return replace(outcome, is_checked=control is not None)

    async def _ask(self, name: str, samples: Sequence[Sample]) -> list[Outcome]:
        async with self._late_places:
            await self._places.acquire()
            late = asyncio.get_running_loop().call_later(PATIENCE_S, self._places.release)
            try:
                outcomes = await self._servers[name].ask(name, samples)
            finally:
                if late.when() <= asyncio.get_running_loop().time():
                    self.events["late"] += 1
                else:
                    late.cancel()
                    self._places.release()
        for sample, outcome in zip(samples, outcomes, strict=False):  # it may have ended early
            if outcome.is_graded:
                self._controls.setdefault(name, sample)
        return outcomes
