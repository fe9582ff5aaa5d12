"""The episodes of one group, played side by side in a user's environment, then graded.

consumes:     a request for the episodes of one group, an environment, services
produces:     the episodes and their verdicts, or `EpisodeFailed` naming what has failed
waits for:    turns, verdicts and whatever else the environment asks of the services
unblocked by: their answers; an environment that asks for nothing for too long
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from async_grpo.environments.base import Environment, EpisodeFailed, FailureClass, Services
from async_grpo.environments.episode import EpisodePolicy, NoRoom
from async_grpo.errors import AsyncGrpoError, DeadlineError
from async_grpo.types import (
    Episode,
    EpisodesRequest,
    PlayedGroup,
    Question,
    RequestPulse,
    SamplingContract,
    Turn,
    Verdict,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")
LOOK_INTERVAL_S = 1.0  # at environments that ask for nothing
AFTER_LOSS_S = 1.0
TRIES = 3  # of a turn whose engine was lost, and of an episode that failed
MAX_REASON_CHARACTERS = 500


class TurnServices(Services, Protocol):
    """What an episode asks of others, and the turns that its policy asks for."""

    async def generate(
        self, request: EpisodesRequest, history: Any, sampling: SamplingContract, prefer: str
    ) -> Turn:
        """One turn, of weights that the group may have; if possible by the worker `prefer`."""


class GroupPlay:
    """One request in play."""

    def __init__(
        self, environment: Environment, request: EpisodesRequest, services: TurnServices
    ) -> None:
        self._environment = environment
        self._request = request
        self._services = services
        self._policies: list[EpisodePolicy] = []
        self._members: list[_Member] = []
        self._pings = 0

    def pulse(self) -> RequestPulse:
        """How far the group is.

        A turn's tokens come when it ends. Until then its engine's own lease watches over it, and
        here every ping counts as progress.
        """
        self._pings += any(member.asks for member in self._members)
        num_tokens = sum(policy.num_tokens for policy in self._policies)
        return RequestPulse(num_tokens + self._pings, is_waiting=False)

    async def run(self) -> PlayedGroup:
        """Play and grade; the first failure that stays ends the group."""
        tasks = [
            asyncio.create_task(self._episode(), name=f"episode-{self._request.ordinal}-{number}")
            for number in range(self._request.num_samples)
        ]
        try:
            episodes = tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
        return PlayedGroup(episodes, await self._verdicts(episodes))

    async def _episode(self) -> Episode:
        """One episode; what failed is played again, from its question."""
        for _ in range(TRIES - 1):
            try:
                return await self._played()
            except EpisodeFailed as error:
                logger.warning("an episode of question %d: %s", self._request.ordinal, error)
        return await self._played()

    async def _played(self) -> Episode:
        request, member = self._request, self._joined()
        policy = EpisodePolicy(
            partial(member.turn, request),
            sampling=request.sampling,
            max_row_tokens=request.max_row_tokens,
        )
        self._policies.append(policy)
        play = self._environment.play(request.question, policy, member)
        try:
            episode = await self._unless_idle(play, member)
        except NoRoom as error:
            episode = policy.episode(is_cut=True)
            if not episode.turns:
                raise self._failed(FailureClass.ENVIRONMENT, f"has no room: {error}") from error
        except Exception as error:  # the user's own code may raise anything
            raise self._classified(FailureClass.ENVIRONMENT, error) from error
        if not isinstance(episode, Episode) or not episode.turns:
            what = f"must sample a turn and return policy.episode(), it returned {episode!r}"
            raise self._failed(FailureClass.ENVIRONMENT, what)
        return episode

    async def _verdicts(self, episodes: tuple[Episode, ...]) -> tuple[Verdict, ...]:
        member = self._joined()
        grade = self._environment.grade(self._request.question, episodes, member)
        try:
            verdicts = tuple(await self._unless_idle(grade, member))
        except Exception as error:  # the user's own code may raise anything
            raise self._classified(FailureClass.JUDGE, error) from error
        if len(verdicts) != len(episodes) or not all(isinstance(v, Verdict) for v in verdicts):
            what = f"must return {len(episodes)} verdicts, it returned {verdicts!r}"
            raise self._failed(FailureClass.JUDGE, what)
        return verdicts

    def _joined(self) -> _Member:
        self._members.append(_Member(self._services))
        return self._members[-1]

    async def _unless_idle(self, work: Coroutine[Any, Any, T], member: _Member) -> T:
        """What the user's `work` returns, however long it takes, while it asks for anything."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_INTERVAL_S))[0]:
                if member.idle_s > self._request.idle_timeout_s:
                    what = f"has asked for nothing for {member.idle_s:.0f} s, in {_line_of(task)}"
                    raise self._failed(FailureClass.DEADLINE, what)
            return task.result()
        finally:
            task.cancel()

    def _classified(self, failure: FailureClass, error: Exception) -> EpisodeFailed:
        """The error with the user's own line, as far down as it goes."""
        if isinstance(error, EpisodeFailed):
            return error
        frames = traceback.extract_tb(error.__traceback__)
        path = self._request.source.name.rpartition(":")[0]
        last = next((f for f in reversed(frames) if f.filename == path), frames[-1])
        return self._failed(failure, f"raised {error!r} at {last.filename}:{last.lineno}")

    def _failed(self, failure: FailureClass, what: str) -> EpisodeFailed:
        what = what[:MAX_REASON_CHARACTERS]
        who = f"{self._request.source.name} of question {self._request.ordinal}"
        return EpisodeFailed(failure, f"environment {who} {what}")


class _Member:
    """The services as one episode, or the grading, sees them; knows when it waits for none."""

    def __init__(self, services: TurnServices) -> None:
        self._services = services
        self.asks = 0  # unanswered
        self._idle_since_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        return 0.0 if self.asks else time.monotonic() - self._idle_since_s

    async def verify(self, question: Question, episodes: Sequence[Episode]) -> tuple[Verdict, ...]:
        """See `Services`."""
        with self._asking():
            return await self._services.verify(question, episodes)

    async def ask(self, role: str, method: str, request: Any, *, cost: float = 1.0) -> Any:
        """See `Services`."""
        with self._asking():
            return await self._services.ask(role, method, request, cost=cost)

    async def turn(
        self, request: EpisodesRequest, history: Any, sampling: SamplingContract, prefer: str
    ) -> Turn:
        """A turn; one whose engine was lost is sampled again by another."""
        with self._asking():
            for _ in range(TRIES - 1):
                try:
                    return await self._services.generate(request, history, sampling, prefer)
                except AsyncGrpoError as error:
                    logger.warning("a turn is sampled again: %s", error)
                    await asyncio.sleep(AFTER_LOSS_S)
            try:
                return await self._services.generate(request, history, sampling, "")
            except AsyncGrpoError as error:
                is_late = isinstance(error, DeadlineError)
                failure = FailureClass.DEADLINE if is_late else FailureClass.ENGINE
                message = f"a turn failed {TRIES} times, the last time: {error}"
                raise EpisodeFailed(failure, message) from error

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        self.asks += 1
        try:
            yield
        finally:
            self.asks -= 1
            self._idle_since_s = time.monotonic()


def _line_of(task: asyncio.Task[Any]) -> str:
    stack = task.get_stack()
    return f"{stack[-1].f_code.co_filename}:{stack[-1].f_lineno}" if stack else "no line"
