import signal

import pytest

from async_grpo.verification.accident import classify_end, classify_silence
from async_grpo.verification.config import VerifierConfig

CONFIG = VerifierConfig(reward_names=("mine",), timeout_s=10.0, memory_mib=1000)


def ended(code, memory_mib=100.0):
    return {"exit_code": code, "cpu_s": 0.1, "memory_mib": memory_mib}


@pytest.mark.parametrize(
    ("report", "status"),
    [
        (ended(-signal.SIGXCPU), "overrun"),
        (ended(-signal.SIGKILL, 900.0), "overrun"),
        (ended(-signal.SIGKILL, 100.0), "lost"),
        (ended(-signal.SIGTERM), "lost"),
        (ended(-signal.SIGSEGV), "error"),
        (ended(-signal.SIGSEGV, 900.0), "error"),
        (ended(-signal.SIGABRT), "error"),
        (ended(0), "error"),
        (ended(3), "error"),
        ({"too_many_processes": 64}, "overrun"),
        ({}, "lost"),
    ],
)
def test_only_a_limit_that_was_reached_blames_the_text(report, status):
    outcome = classify_end("mine", report, CONFIG)
    assert (outcome.status, outcome.reward, outcome.adapter) == (status, 0.0, "mine")
    assert outcome.reason


@pytest.mark.parametrize(
    ("report", "status"),
    [
        ({}, "overrun"),
        ({"is_stopped": False, "ran_s": 10.0, "waited_s": 0.0}, "overrun"),
        ({"is_stopped": False, "ran_s": 0.0, "waited_s": 0.0}, "overrun"),  # it sleeps
        ({"is_stopped": False, "ran_s": 2.0, "waited_s": 8.0}, "overrun"),  # a busy machine
        ({"is_stopped": False, "ran_s": 0.5, "waited_s": 9.5}, "lost"),
        ({"is_stopped": True, "ran_s": 0.1, "waited_s": 0.0}, "lost"),
        (ended(-signal.SIGSEGV), "error"),
    ],
)
def test_a_process_that_was_stopped_or_starved_has_not_overrun(report, status):
    assert classify_silence("mine", report, CONFIG).status == status
