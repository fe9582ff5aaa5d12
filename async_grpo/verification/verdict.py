"""From what each adapter said of an output to the one verdict that counts."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from async_grpo.types import Verdict, VerdictStatus
from async_grpo.verification.config import MAX_PROCESSES, VerifierConfig
from async_grpo.verification.tasks import Outcome, overrun

Report = Mapping[str, Any]  # of a fork server, in JSON
NUM_ATTEMPTS = 2  # of an overrun or an error
MAX_LOST = 4  # attempts whose process was taken away, which says nothing of the text
CPU_SHARE = 0.9  # of the time limit: killed after so much, the kernel's limit was reached
WAITING_SHARE = 0.5  # of the time limit; less, in three times as long on the wall's clock, waited
MEMORY_SHARE = 0.5  # of its limit; killed with so much, the system had to make room


def lost(adapter: str, reason: str) -> Outcome:
    """The attempt says nothing of the text."""
    return Outcome(adapter, "lost", reason=reason, cause="lost")


def classify_end(
    adapter: str, report: Report, config: VerifierConfig, *, executes_text: bool = False
) -> Outcome:
    """The outcome of an attempt whose process did not end well; the report is its server's.

    What waited for a connection says nothing of the text, unless it is the text that was executed.

    >>> config = VerifierConfig(reward_names=())
    >>> report = {"exit_code": -11, "cpu_s": 0.1, "memory_mib": 90.0, "killed_for": ""}
    >>> classify_end("mine", report, config).status
    'error'
    >>> classify_end("mine", report | {"exit_code": -9}, config).status
    'lost'
    >>> classify_end("mine", report | {"exit_code": -9, "cpu_s": 10.1}, config).status
    'overrun'
    """
    if "exit_code" not in report:
        return lost(adapter, report.get("failed", "its server was ended from outside"))
    code, memory_mib = report["exit_code"], report["memory_mib"]
    if report["killed_for"] == "memory":
        return overrun(adapter, f"needs more than {config.memory_limit} in all of its processes")
    if report["killed_for"] == "processes":
        return overrun(adapter, f"starts more than {MAX_PROCESSES} processes")
    if report["killed_for"] == "time":
        if has_waited(report, config) and not executes_text:
            reason = f"waits for a connection for longer than {config.time_limit} allows"
            return Outcome(adapter, "error", reason=reason, cause="connection")
        return overrun(adapter, f"takes longer than {config.time_limit} allows")
    if report["killed_for"] == "answers":
        return Outcome(adapter, "error", reason="its process sent no answer but more", cause="end")
    is_killed = code == -signal.SIGKILL
    if report["killed_for"] == "processor" or (
        is_killed and report["cpu_s"] >= CPU_SHARE * config.timeout_s
    ):
        return overrun(adapter, f"uses more processor time than {config.time_limit}")
    if is_killed and memory_mib > MEMORY_SHARE * config.memory_mib:
        return overrun(adapter, f"was killed while it held {memory_mib:.0f} MiB")
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        return lost(adapter, f"its process was ended from outside, code {code}")
    return Outcome(adapter, "error", reason=f"its process ended, exit code {code}", cause="end")


def has_waited(report: Report, config: VerifierConfig) -> bool:
    """Whether it was seen with a connection, and its processes did little beside."""
    is_idle = report["family_cpu_s"] < WAITING_SHARE * config.timeout_s
    return bool(report["is_connected"] and is_idle)


def is_settled(attempts: Sequence[Outcome]) -> bool:
    """Whether another attempt could tell more."""
    if attempts and attempts[-1].is_graded:
        return True
    num_lost = sum(attempt.status == "lost" for attempt in attempts)
    return len(attempts) - num_lost >= NUM_ATTEMPTS or num_lost >= MAX_LOST


def settle(attempts: Sequence[Outcome]) -> Outcome:
    """One adapter's outcome over its attempts: the last, but an overrun every time is final.

    What overruns again, just after another sample was graded in time, is the text's own doing, a
    bad answer. What was lost counts for nothing; when nothing else is left,
    verification has failed.
    """
    last = attempts[-1]
    if last.is_graded or last.status == "error":
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
