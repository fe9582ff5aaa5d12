"""What the end of a verifier process says: of the text, of the adapter, or of neither."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.verdict import Outcome

STARVED_SHARE = 0.5  # of the time it waited for a processor ...
STARVED_WORK = 0.1  # ... and did not even work for that share: the machine is to blame
MEMORY_SHARE = 0.5  # of its limit; killed with so much, the system had to make room


def classify_end(adapter: str, report: Mapping[str, Any], config: VerifierConfig) -> Outcome:
    """The outcome of an attempt whose process ended by itself or by its keeper's rule.

    >>> config = VerifierConfig(reward_names=())
    >>> classify_end("mine", {"exit_code": -11, "cpu_s": 0.1, "memory_mib": 90.0}, config).status
    'error'
    >>> classify_end("mine", {"exit_code": -9, "cpu_s": 0.1, "memory_mib": 90.0}, config).status
    'lost'
    >>> classify_end("mine", {"exit_code": -9, "cpu_s": 0.1, "memory_mib": 4e3}, config).status
    'overrun'
    """
    if "too_many_processes" in report:
        limit = report["too_many_processes"]
        return overrun(adapter, f"starts more than {limit} processes")
    code = report.get("exit_code")
    if code is None:
        return _lost(adapter, "its process and its keeper were ended from outside")
    if code == -signal.SIGXCPU:
        return overrun(adapter, f"uses more processor time than {config.time_limit}")
    if code == -signal.SIGKILL and report["memory_mib"] > MEMORY_SHARE * config.memory_mib:
        return overrun(adapter, f"was killed while it held {report['memory_mib']:.0f} MiB")
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        return _lost(adapter, f"its process was ended from outside, code {code}")
    return Outcome(adapter, "error", reason=f"its process ended, exit code {code}", cause="end")


def classify_silence(adapter: str, report: Mapping[str, Any], config: VerifierConfig) -> Outcome:
    """The outcome of an attempt that was still going on at its deadline."""
    if "exit_code" in report or "too_many_processes" in report:
        return classify_end(adapter, report, config)
    if report.get("is_stopped"):
        return _lost(adapter, "its process was stopped from outside")
    ran_s, waited_s = report.get("ran_s", 0.0), report.get("waited_s", 0.0)
    if waited_s > STARVED_SHARE * config.timeout_s and ran_s < STARVED_WORK * config.timeout_s:
        reason = f"its process got {ran_s:.1f} s of a processor in {config.timeout_s:g} s"
        return _lost(adapter, reason)
    return overrun(adapter, f"takes longer than {config.time_limit}")


def overrun(adapter: str, reason: str) -> Outcome:
    """The adapter has reached a limit."""
    return Outcome(adapter, "overrun", reason=reason, cause="overrun")


def _lost(adapter: str, reason: str) -> Outcome:
    return Outcome(adapter, "lost", reason=reason, cause="lost")
