"""Mathematics ends at its budget of processor time, whatever the text and the libraries do."""

import signal
import threading
import time

import pytest

from async_grpo.verification.graders import UnscorableError, math_verify
from async_grpo.verification.graders.limits import cost, within_cpu

# Each was seen to take from seconds to for ever, and breaks no rule about texts.
REPETITIONS = {
    "quotients": "/".join("9" * 20),
    "indices": "_".join("a" * 30),
    "ratios": ":".join("9" * 30),
    "braces": "{" * 16 + "9" + "}" * 16,
    "letters in braces": "{9pi " * 16 + "9" + "}" * 16,
}


def spin(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


@pytest.mark.parametrize(
    ("kind", "expected"), [*((kind, "5") for kind in REPETITIONS), ("ratios", "x+1")]
)
def test_a_short_repetition_costs_no_more_than_the_budget(kind, expected, monkeypatch):
    text, budget_s = REPETITIONS[kind], 0.3
    monkeypatch.setattr(math_verify, "MAX_CPU_S", budget_s)
    started = time.process_time()
    try:
        assert math_verify.math_verify_reward(rf"\boxed{{{text}}}", expected) == 0.0
    except UnscorableError as error:
        assert "processor time" in str(error) or cost(text, expected=expected)
    assert time.process_time() - started < budget_s + 1.0


def test_work_that_swallows_exceptions_ends_all_the_same():
    def swallow():
        try:
            spin(5.0)
        except BaseException:  # as a library may
            spin(5.0)

    with pytest.raises(UnscorableError, match=r"more than 0\.05 s of processor"):
        within_cpu(0.05, swallow)


def test_neither_timer_nor_handler_outlives_the_work():
    before = signal.getsignal(signal.SIGPROF)
    assert within_cpu(5.0, lambda: 7) == 7
    with pytest.raises(UnscorableError):
        within_cpu(0.01, lambda: spin(5.0))
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) is before


def test_another_thread_grades_without_a_budget():
    rewards = []
    thread = threading.Thread(
        target=lambda: rewards.append(math_verify.math_verify_reward(r"\boxed{5}", "5"))
    )
    thread.start()
    thread.join()
    assert rewards == [1.0]
