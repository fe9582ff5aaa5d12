"""From what each adapter said of an output to the one verdict that counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from async_grpo.types import FailureCause, Verdict, VerdictStatus

NUM_ATTEMPTS = 2  # of an overrun or an error
MAX_LOST = 4  # attempts whose process was taken away, which says nothing of the text


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one adapter did with one output, at one attempt.

    `overrun`: it used more time, memory, stack, files or processes than a verification may.
    `error`: the adapter failed. `lost`: its process was killed, stopped or starved from outside.
    """

    adapter: str
    status: Literal["scored", "unscorable", "overrun", "error", "lost"]
    reward: float = 0.0
    format_reward: float | None = None
    reason: str = ""
    max_reward: float = 1.0
    cause: FailureCause = ""
    place: str = ""  # of an exception: its type and the user's line
    is_checked: bool = False  # the same fresh process had graded a control sample just before


def is_settled(attempts: Sequence[Outcome]) -> bool:
    """Whether another attempt could tell more."""
    if attempts and attempts[-1].status in ("scored", "unscorable"):
        return True
    num_lost = sum(attempt.status == "lost" for attempt in attempts)
    return len(attempts) - num_lost >= NUM_ATTEMPTS or num_lost >= MAX_LOST


def settle(attempts: Sequence[Outcome]) -> Outcome:
    """One adapter's outcome over its attempts: the last, but an overrun every time is final.

    What overruns again on a fresh process, which has just graded another sample in time, is the
    text's own doing, a bad answer. What was lost counts for nothing; when nothing else is left,
    verification has failed.
    """
    last = attempts[-1]
    if last.status in ("scored", "unscorable", "error"):
        return last
    told = [attempt for attempt in attempts if attempt.status != "lost"]
    repeated = len(told) >= NUM_ATTEMPTS and all(attempt.status == "overrun" for attempt in told)
    status: VerdictStatus = "unscorable" if repeated and told[-1].is_checked else "error"
    reason = ", then ".join(dict.fromkeys(attempt.reason for attempt in attempts))
    return Outcome(last.adapter, status, reason=reason, cause="overrun" if repeated else "lost")


def best_verdict(outcomes: Sequence[Outcome], *, seconds: float) -> Verdict:
    """The highest reward counts; an error counts unless another adapter gave its maximum.

    Of several errors the first tells the cause; one of a connection only when all are.
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
