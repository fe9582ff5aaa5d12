"""Plays the episodes of one group concurrently in a user's environment, then grades them.

consumes:     a request for the episodes of one group, an environment, services
produces:     the episodes and their verdicts, or `EpisodeFailed` with the part that failed
waits for:    turns, verdicts and other answers of the services
unblocked by: these answers; or an environment waits for none for too long
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import traceback
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import TypeVar, get_args

from async_grpo.config.roles import ENVIRONMENT
from async_grpo.environments import causes
from async_grpo.environments.base import Environment, EpisodeFailed, FailureClass
from async_grpo.environments.episode import (
    MAX_REASON_CHARACTERS,
    Ask,
    EpisodePolicy,
    EpisodeServices,
    FindRenderer,
    NoRoom,
)
from async_grpo.types import (
    Episode,
    EpisodesRequest,
    FailureCause,
    PlayedGroup,
    RequestPulse,
    Verdict,
    VerdictStatus,
)
from async_grpo.util.errors import escaped
from async_grpo.util.waiting import together

logger = logging.getLogger(__name__)
T = TypeVar("T")
LOOK_INTERVAL_S = 1.0  # between checks whether an environment waits for nothing


class GroupPlay:
    """Plays the episodes of one request."""

    def __init__(self, request: EpisodesRequest, ask: Ask, find_renderer: FindRenderer) -> None:
        self.request = request
        self._ask = ask
        self._find_renderer = find_renderer
        self._policies: list[EpisodePolicy] = []
        self._members: list[EpisodeServices] = []
        self._again: dict[str, tuple[int, int]] = {}
        self._stopped: dict[int, Verdict] = {}  # of episodes that a `ModelError` ended, by index
        self._pings = 0

    def pulse(self, *, is_held: bool = False) -> RequestPulse:
        """The progress of the group; `is_held`: user code blocks the event loop of all episodes.

        A turn's tokens arrive when it ends. Until then the lease of its engine watches it, and
        each ping counts as progress here.
        """
        self._pings += not is_held and any(member.asks for member in self._members)
        num_tokens = sum(policy.num_tokens for policy in self._policies)
        return RequestPulse(num_tokens + self._pings, is_waiting=False)

    async def run(self, environment: Environment) -> PlayedGroup:
        """Play and grade; the first failure that is not retried ends the group."""
        work = (self._episode(environment, index) for index in range(self.request.num_samples))
        try:
            played = await together(work, name=f"episode-{self.request.ordinal}")
            episodes = self._all_with_verdicts(played)
            verdicts = await self._verdicts(environment, episodes)
        except EpisodeFailed as error:
            error.again = self._again
            raise
        judged = [verdicts for member in self._members for verdicts in member.judged]
        disagreed = sum(any(other != first for other in rest) for first, *rest in judged)
        return PlayedGroup(episodes, verdicts, len(judged), disagreed, self._again)

    async def _episode(self, environment: Environment, index: int) -> Episode:
        """Play one episode; a try that fails before its first turn is repeated."""
        outage: causes.Outage | None = None
        try:
            for number in itertools.count(1):
                member = self._joined(index, outage)
                try:
                    return await self._played(environment, member)
                except EpisodeFailed as error:
                    has_sampled = member.num_turns > 0
                    follows = causes.decide(error.cause, has_sampled=has_sampled, num_tries=number)
                    if follows is not causes.Next.MEMBER:
                        raise
                    logger.warning("an episode of question %d: %s", self.request.ordinal, error)
                    reason = f"{ENVIRONMENT}: {error.failure}"
                    self._again[reason] = self._again.get(reason, (0, 0))[0] + 1, 0
                    if error.cause is causes.Cause.SERVER:
                        outage = outage or causes.Outage(member.tell(str(error)))
                if outage:
                    await outage.pause()
        finally:
            if outage:
                outage.close()
        raise AssertionError("tries are counted without end")

    async def _played(self, environment: Environment, member: EpisodeServices) -> Episode:
        request = self.request
        policy = EpisodePolicy(
            member.turn,
            sampling=request.sampling,
            max_row_tokens=request.max_row_tokens,
            constrains=request.constrains,
        )
        self._policies.append(policy)
        play = environment.play(request.question, policy, member)
        limit = asyncio.timeout(request.episode_timeout_s or None)
        try:
            async with limit:
                returned = await self._unless_idle(play, member)
            return self._accepted(returned, policy)
        except NoRoom as error:
            episode = policy.episode(is_cut=True)
            if not episode.turns:
                raise self._failed(FailureClass.ENVIRONMENT, f"has no room: {error}") from error
            return episode
        except causes.ModelError as error:
            episode = policy.episode()
            if not episode.turns:
                raise self._classified(FailureClass.ENVIRONMENT, error) from error
            why = escaped(str(error)[:MAX_REASON_CHARACTERS])
            logger.info("an episode of question %d has ended: %s", request.ordinal, why)
            ungraded = Verdict("unscorable", 0.0, None, "", why, 0.0)
            self._stopped[member.index] = _plain(error.verdict or ungraded)
            return episode if not error.verdict else replace(episode, verdict=error.verdict)
        except Exception as error:  # the user's own code may raise anything
            if limit.expired():
                what = f"took longer than --episode-timeout-s {request.episode_timeout_s:g}"
                raise self._failed(FailureClass.TIMEOUT, what) from error
            failed = self._classified(FailureClass.ENVIRONMENT, error)
            if failed.cause is causes.Cause.SERVER and member.num_turns:
                await causes.until_back(error, member.tell)
            raise failed from error

    def _accepted(self, returned: object, policy: EpisodePolicy) -> Episode:
        if not isinstance(returned, Episode) or not returned.turns:
            what = f"must sample a turn and return policy.episode(), it returned {returned!r}"
            raise self._failed(FailureClass.ENVIRONMENT, what)
        if problem := policy.complaint(returned):
            what = f"must return policy.episode(), whose rows are what was sampled: {problem}"
            raise self._failed(FailureClass.ENVIRONMENT, what)
        return policy.masked_as(returned)

    def _all_with_verdicts(self, episodes: Sequence[Episode]) -> tuple[Episode, ...]:
        """If any episode has a verdict, those that a `ModelError` ended get one too."""
        if not any(episode.verdict for episode in episodes):
            return tuple(episodes)
        return tuple(
            replace(episode, verdict=episode.verdict or self._stopped.get(index))
            for index, episode in enumerate(episodes)
        )

    async def _verdicts(
        self, environment: Environment, episodes: tuple[Episode, ...]
    ) -> tuple[Verdict, ...]:
        member = self._joined()

        async def graded() -> tuple[Verdict, ...]:
            grade = environment.grade(self.request.question, episodes, member)
            return tuple(map(_plain, await self._unless_idle(grade, member)))

        try:  # no token is sampled here, so a failure of a server is retried; no other is
            verdicts = await member.reach(graded, is_idempotent=True)
        except Exception as error:  # the user's own code may raise anything
            failed = self._classified(FailureClass.JUDGE, error)
            failed.cause = causes.Cause.UNKNOWN
            raise failed from error
        if len(verdicts) != len(episodes):
            what = f"must return {len(episodes)} verdicts, it returned {verdicts!r}"
            raise self._failed(FailureClass.JUDGE, what)
        return verdicts

    def _joined(self, index: int = 0, outage: causes.Outage | None = None) -> EpisodeServices:
        self._members.append(
            EpisodeServices(self.request, self._ask, self._find_renderer, index, outage)
        )
        return self._members[-1]

    async def _unless_idle(self, work: Coroutine[object, object, T], member: EpisodeServices) -> T:
        """The result of the user's `work`, which may take any time, but not wait for nothing."""
        task = asyncio.create_task(_never_exiting(work, member.tell))
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_INTERVAL_S))[0]:
                if member.idle_s > self.request.idle_timeout_s:
                    frame = getattr(work, "cr_frame", None)  # the line that waits
                    stack = [(frame, frame.f_lineno)] if frame else []
                    line = self.request.environment.line_in(traceback.StackSummary.extract(stack))
                    what = f"has asked for nothing for {member.idle_s:.0f} s, in {line}"
                    raise self._failed(FailureClass.DEADLINE, what)
            if task.cancelled():
                raise self._failed(FailureClass.ENVIRONMENT, "has cancelled itself")
            return task.result()
        finally:
            task.cancel()

    def _classified(self, failure: FailureClass, error: Exception) -> EpisodeFailed:
        """The error as an `EpisodeFailed` that names the last line of the user's code."""
        code = self.request.environment
        line = code.line_in(traceback.extract_tb(error.__traceback__))
        if isinstance(error, EpisodeFailed):  # a subclass of the user's may have any `failure`
            known = error.failure in list(FailureClass)
            failure = FailureClass(error.failure) if known else failure
            at = f" at {line}" if code.place in line else ""
            failed = EpisodeFailed(failure, shortened(f"{error}{at}"), cause=error.cause)
        else:
            cause = causes.cause_of(error)
            failed = self._failed(failure, f"raised {error!r} at {line}", cause=cause)
        failed.place = f"{type(error).__name__} {line}"
        return failed

    def _failed(
        self, failure: FailureClass, what: str, *, cause: causes.Cause | None = None
    ) -> EpisodeFailed:
        who = f"{self.request.environment.name} of question {self.request.ordinal}"
        return EpisodeFailed(failure, f"environment {who} {shortened(what)}", cause=cause)


def shortened(text: str) -> str:
    """A reason of bounded length: its start, which names what failed, and its end, the error.

    >>> shortened("agent.py: " + "x" * 9000 + " KeyError")[-24:]
    'xxxxxxxxxxxxxxx KeyError'
    """
    if len(text) <= MAX_REASON_CHARACTERS:
        return text
    head = MAX_REASON_CHARACTERS * 2 // 5
    return f"{text[:head]} ... {text[head - MAX_REASON_CHARACTERS :]}"


def _plain(verdict: object) -> Verdict:
    """A copy with plain values, which every process can unpickle.

    Raises `ValueError` for anything but a valid verdict.
    """
    if not isinstance(verdict, Verdict) or verdict.status not in get_args(VerdictStatus):
        raise ValueError(f"a verdict must be a Verdict of a known status, got {verdict!r}")
    if not math.isfinite(verdict.reward):
        raise ValueError(f"a reward must be finite, got {verdict.reward!r}")
    return Verdict(
        verdict.status,
        float(verdict.reward),
        None if verdict.format_reward is None else float(verdict.format_reward),
        escaped(str(verdict.adapter)[:MAX_REASON_CHARACTERS]),
        escaped(str(verdict.reason)[:MAX_REASON_CHARACTERS]),
        float(verdict.seconds),
        verdict.cause if verdict.cause in get_args(FailureCause) else "exception",
        escaped(str(verdict.place)[:MAX_REASON_CHARACTERS]),
    )


async def _never_exiting(work: Coroutine[object, object, T], tell: causes.Tell) -> T:
    """`work` without these two exceptions, which would end the event loop of all episodes."""
    causes.TELL.set(tell)  # for this task, and those that it starts
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"it has called for the end of its process: {error!r}") from error
