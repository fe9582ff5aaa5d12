"""Grading behind fork servers: whatever a text or an adapter does, grading goes on.

group --requests for an adapter--> fork server --> outcomes, failed ones retried --> best verdicts
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from async_grpo.config.worker_config import refuse_switches
from async_grpo.types import Verdict, VerdictStatus
from async_grpo.util.errors import ConfigError
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.server import GraderServer
from async_grpo.verification.tasks import Outcome, Sample

PATIENCE_S = 0.5  # a request that takes longer is late: it makes room for another
PIECE_S = 2.0  # about how long one process grades samples of a group
MAX_PIECE = 64  # samples of a group in one process
MAX_LATE = 2  # late requests at a time, for each process of the configuration
NUM_ATTEMPTS = 2  # of an overrun or an error
MAX_LOST = 4  # attempts whose process was ended from outside, which says nothing about the text


class Sandbox:
    """Grades samples with every adapter of the configuration, `num_processes` requests at a time.

    A request that is not done after `PATIENCE_S` does not count any more, though it goes on until
    its time limit: a sample that hangs does not delay others.

    `events` counts failures since the start, by kind: outcomes that are overruns, errors or lost,
    `retried` attempts, `late` requests, `server_restarts`.
    """

    def __init__(self, config: VerifierConfig, *, num_processes: int) -> None:
        self._config = config
        self.num_processes = num_processes
        self._servers: dict[str, GraderServer] = {}  # by adapter
        self._places = asyncio.Semaphore(num_processes)
        self._late_places = asyncio.Semaphore(num_processes * (1 + MAX_LATE))
        self._controls: dict[str, Sample] = {}  # by adapter, the first sample that it graded
        self._seconds: dict[str, float] = {}  # by adapter, recent mean time of a sample
        self.events: Counter[str] = Counter()

    @property
    def confinement(self) -> dict[str, str]:
        """By kind of code that it runs, why that is not confined; empty texts: it is."""
        servers = {*self._servers.values()}
        return {what: why for each in servers for what, why in each.confinement.items()}

    @property
    def groupwise(self) -> tuple[str, ...]:
        """Names of the adapters that grade all samples of a question in one call."""
        return tuple(name for name, server in self._servers.items() if name in server.groupwise)

    async def start(self) -> None:
        """Start the servers: one for shipped graders, one for users' functions.

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
        """Start the server of shipped graders; it reports which of these rewards they are."""
        server = await self._make_server(names, shipped=True)
        try:
            await server.start()
        except ConfigError:  # a user's registry, which is wrong or needs the network
            return
        self._servers |= dict.fromkeys(server.shipped, server)
        if not server.shipped:
            server.close()

    async def _make_server(self, names: tuple[str, ...], *, shipped: bool) -> GraderServer:
        """A server of these adapters; raises `ConfigError` if it must be confined and cannot be."""
        config = replace(self._config, reward_names=names)
        # In a thread, as it tries the confinement, which blocks.
        return await asyncio.to_thread(GraderServer, config, shipped=shipped, events=self.events)

    async def resize(self, num_processes: int) -> None:
        """Grade in `num_processes` from now on; running requests go on."""
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
        """The best verdict of each sample of one group.

        `names`: of the adapters to run; by default all but groupwise ones.
        """
        started = time.perf_counter()
        outcomes = await self._outcomes(samples, names)
        seconds = time.perf_counter() - started
        return tuple(best_verdict(each, seconds=seconds) for each in zip(*outcomes, strict=True))

    async def grade_with_each(
        self, sample: Sample, names: Sequence[str] = ()
    ) -> tuple[Verdict, ...]:
        """The verdict of each adapter alone; `names`: of the adapters, by default all.

        Raises `ConfigError` for a groupwise adapter beside others: they grade again single samples
        of a group, which a groupwise one cannot grade without the rest.
        """
        chosen = names or self._config.reward_names
        groupwise = [name for name in chosen if name in self.groupwise]
        if groupwise and len(chosen) > 1:
            raise ConfigError(
                f"a groupwise reward must grade its questions alone, got {','.join(chosen)}: give "
                f"{groupwise[0]} to the verifiers alone, or to a type of --data by rewards="
            )
        outcomes = await self._outcomes([sample], names)
        return tuple(best_verdict(of_one, seconds=0.0) for of_one in outcomes)

    async def close(self) -> None:
        """End all servers, for good."""
        for server in set(self._servers.values()):
            server.close()

    async def _outcomes(
        self, samples: Sequence[Sample], names: Sequence[str]
    ) -> list[list[Outcome]]:
        """[adapter][sample]; without `names`, of the adapters that are not groupwise, if any."""
        every = self._config.reward_names
        chosen = names or [name for name in every if name not in self.groupwise] or every
        return await asyncio.gather(*(self._grade_with(name, samples) for name in chosen))

    async def _grade_with(self, name: str, samples: Sequence[Sample]) -> list[Outcome]:
        """Grade pieces of the group side by side, then each failed sample again, alone."""
        if name in self._servers[name].groupwise:
            return await self._grade_together(name, samples)
        # Many samples of a quick adapter go to one process, one of a slow adapter.
        size = max(1, min(MAX_PIECE, int(PIECE_S / self._seconds.get(name, 1e-3))))
        pieces = [samples[start : start + size] for start in range(0, len(samples), size)]
        graded = await asyncio.gather(*(self._first_attempts(name, piece) for piece in pieces))
        outcomes = [outcome for of_piece in graded for outcome in of_piece]
        failed = [n for n, outcome in enumerate(outcomes) if not outcome.is_graded]
        again = (self._settled(name, samples[n], outcomes[n]) for n in failed)
        for n, outcome in zip(failed, await asyncio.gather(*again), strict=True):
            outcomes[n] = outcome
        return outcomes

    async def _grade_together(self, name: str, samples: Sequence[Sample]) -> list[Outcome]:
        """Grade all samples in one call of the adapter, which fails for all of them."""
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

    async def _first_attempts(self, name: str, samples: Sequence[Sample]) -> list[Outcome]:
        """Grade each sample once; after one that ends its process, a new process goes on."""
        outcomes: list[Outcome] = []
        while len(outcomes) < len(samples):
            started = time.perf_counter()
            done = await self._ask(name, samples[len(outcomes) :])
            outcomes += done
            seconds = (time.perf_counter() - started) / len(done)
            self._seconds[name] = (self._seconds.get(name, seconds) + seconds) / 2
        return outcomes

    async def _settled(self, name: str, sample: Sample, first: Outcome) -> Outcome:
        """Grade a sample again until its attempts settle, after a control once one overran."""
        attempts = [first]
        while not is_settled(attempts):
            self.events["retried"] += 1
            has_overrun = any(attempt.status == "overrun" for attempt in attempts)
            control = self._controls.get(name) if has_overrun else None
            attempts.append(await self._attempt(name, sample, control))
        return settle(attempts)

    async def _attempt(self, name: str, sample: Sample, control: Sample | None) -> Outcome:
        """Grade a sample once; before it the control, a sample that the adapter has graded before.

        If the control fails, the sample is not to blame: its outcome is no overrun.
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
        """Send a request once there is a place for it; a late one gives its place back."""
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
        for sample, outcome in zip(samples, outcomes, strict=False):  # the process may end early
            if outcome.is_graded:
                self._controls.setdefault(name, sample)
        return outcomes


def is_settled(attempts: Sequence[Outcome]) -> bool:
    """Whether no further attempt is needed: the last graded, or enough have failed."""
    if attempts and attempts[-1].is_graded:
        return True
    num_lost = sum(attempt.status == "lost" for attempt in attempts)
    return len(attempts) - num_lost >= NUM_ATTEMPTS or num_lost >= MAX_LOST


def settle(attempts: Sequence[Outcome]) -> Outcome:
    """One adapter's outcome on one text: the last attempt's, if that is graded or an error.

    Else unscorable, if every attempt overran, the last one just after the control was graded in
    time: the text is a bad answer. Lost attempts do not count. Else an error.
    """
    last = attempts[-1]
    if last.is_graded or last.status == "error":
        return last
    counted = [attempt for attempt in attempts if attempt.status != "lost"]
    repeated = len(counted) >= NUM_ATTEMPTS and all(a.status == "overrun" for a in counted)
    status: VerdictStatus = "unscorable" if repeated and counted[-1].is_checked else "error"
    reason = ", then ".join(dict.fromkeys(attempt.reason for attempt in attempts))
    return Outcome(last.adapter, status, reason=reason, cause="overrun" if repeated else "lost")


def best_verdict(outcomes: Sequence[Outcome], *, seconds: float) -> Verdict:
    """The highest reward; if an adapter failed, an error, unless another gave its maximum.

    The cause is that of the first error that is not of a connection, else of the first error.
    """
    errors = [outcome for outcome in outcomes if outcome.status == "error"]
    graded = [outcome for outcome in outcomes if outcome.status != "error"]
    if errors and not any(outcome.reward >= outcome.max_reward for outcome in graded):
        names = ",".join(outcome.adapter for outcome in errors)
        reason = "; ".join(f"{outcome.adapter}: {outcome.reason}" for outcome in errors)
        first = min(errors, key=lambda outcome: outcome.cause == "connection")
        return Verdict("error", 0.0, None, names, reason, seconds, first.cause, first.place)
    best = max(graded, key=lambda outcome: (outcome.reward, outcome.status == "scored"))
    status: VerdictStatus = "scored" if best.status == "scored" else "unscorable"
    return Verdict(
        status, best.reward, best.format_reward, best.adapter, best.reason, seconds, best.cause
    )
