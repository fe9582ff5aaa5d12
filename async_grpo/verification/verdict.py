"""From what each adapter said of an output to the one verdict that counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from async_grpo.types import Verdict, VerdictStatus


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one adapter did with one output, at one attempt.

    `overrun`: it used more time, memory or stack than a verification may.
    """

    adapter: str
    status: Literal["scored", "unscorable", "overrun", "error"]
    reward: float = 0.0
    format_reward: float | None = None
    reason: str = ""
    max_reward: float = 1.0


def settle(attempts: Sequence[Outcome]) -> Outcome:
    """One adapter's outcome over its attempts: the last, but an overrun every time is final.

    What overruns again on a fresh process is the text's own doing, a bad answer.
    """
    last = attempts[-1]
    if last.status != "overrun":
        return last
    repeated = all(attempt.status == "overrun" for attempt in attempts)
    status: VerdictStatus = "unscorable" if repeated else "error"
    reasons = dict.fromkeys(attempt.reason for attempt in attempts)
    return Outcome(last.adapter, status, reason=", then ".join(reasons))


def best_verdict(outcomes: Sequence[Outcome], *, seconds: float) -> Verdict:
    """The highest reward counts; an error counts unless another adapter gave its maximum."""
    errors = [outcome for outcome in outcomes if outcome.status == "error"]
    graded = [outcome for outcome in outcomes if outcome.status != "error"]
    if errors and not any(outcome.reward >= outcome.max_reward for outcome in graded):
        names = ",".join(outcome.adapter for outcome in errors)
        reason = "; ".join(f"{outcome.adapter}: {outcome.reason}" for outcome in errors)
        return Verdict("error", 0.0, None, names, reason, seconds)
    best = max(graded, key=lambda outcome: (outcome.reward, outcome.status == "scored"))
    status: VerdictStatus = "scored" if best.status == "scored" else "unscorable"
    return Verdict(status, best.reward, best.format_reward, best.adapter, best.reason, seconds)
