"""Verdicts for the outputs of a question, and what went wrong on the way to them.

consumes:     outputs to grade
produces:     a verdict for each; the first trouble of each kind, for people
waits for:    verifiers, and whatever a reward is connected to, up to the stall timeout
unblocked by: verdicts; a connection that is back
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from async_grpo.batching.failures import MAX_CAUSES, VERIFICATION, SlotFailed, WorkProgress
from async_grpo.types import Problem, Verdict, VerificationRequest

logger = logging.getLogger(__name__)
Requests = tuple[VerificationRequest, ...]
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0  # between tries: 0.25, 0.5, 1, ... 5, 5, 5


class Grading:
    """Asks verifiers; only a connection that fails is asked again, all else they have tried."""

    def __init__(
        self,
        ask: Callable[[Requests, tuple[str, ...]], Awaitable[Sequence[Verdict]]],
        *,
        timeout_s: float,
        progress: WorkProgress,
    ) -> None:
        """`ask(requests, rewards)` has any verifier grade; it raises `SlotFailed` when none can."""
        self._ask = ask
        self._timeout_s = timeout_s
        self._progress = progress
        self._warnings: dict[tuple[str, ...], str] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for the first trouble of each kind that costs no group, or not yet."""
        return tuple(self._warnings.values())

    async def verdicts(
        self, requests: Requests, *, rewards: tuple[str, ...] = ()
    ) -> tuple[Verdict, ...]:
        """What verifiers say in the end, errors among it.

        `rewards`: adapters that grade; none: those of the question's type.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        verdicts = list(await self._ask(requests, rewards))
        pause_s = FIRST_PAUSE_S
        while True:
            self._tell(verdicts)
            away = [n for n, verdict in enumerate(verdicts) if verdict.cause == "connection"]
            if not away or clock() + pause_s - started > self._timeout_s:
                break
            self._progress.problem = Problem(VERIFICATION, f"reward {verdicts[away[0]].reason}")
            await asyncio.sleep(pause_s)
            again = await self._ask(tuple(requests[n] for n in away), rewards)
            for number, verdict in zip(away, again, strict=True):
                verdicts[number] = verdict
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return tuple(verdicts)

    def _tell(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            kind = (verdict.adapter, verdict.status, verdict.cause, verdict.place)
            if verdict.status == "error" and verdict.cause != "connection":
                self._progress.failed(" ".join(kind), self._sentence(verdict))
            elif verdict.cause and kind not in self._warnings and len(self._warnings) < MAX_CAUSES:
                self._warnings[kind] = self._sentence(verdict)
                logger.warning("%s", self._warnings[kind])

    def _sentence(self, verdict: Verdict) -> str:
        if verdict.status == "unscorable":
            return (
                f"reward {verdict.adapter} {verdict.reason} on an output: such outputs count as "
                "unscorable, reward 0, as it grades another sample in time; raise the limit if "
                "they are innocent"
            )
        if verdict.cause == "connection":
            return (
                f"reward {verdict.reason}: a connection that it needs fails, it is asked again for "
                f"up to --stall-timeout-s {self._timeout_s:g}"
            )
        return f"reward {verdict.reason}: the groups of such outputs are dropped, and counted"


def require_graded(verdicts: Sequence[Verdict]) -> None:
    """Raise `SlotFailed` where one is an error: its group is lost as a whole."""
    for verdict in verdicts:
        if verdict.status == "error":
            raise SlotFailed(VERIFICATION, f"reward {verdict.reason}")
