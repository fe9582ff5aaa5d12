import signal
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.sandbox import MAX_LOST, best_verdict, is_settled, settle
from async_grpo.verification.server import classify_end
from async_grpo.verification.tasks import Outcome


def scored(name, reward, **more):
    return Outcome(name, "scored", reward=reward, **more)


def unscorable(name):
    return Outcome(name, "unscorable", reason="no answer")


def failed(name):
    return Outcome(name, "error", reason="it broke")


def overrun(name, *, is_checked=False):
    return Outcome(name, "overrun", reason="takes too long", cause="overrun", is_checked=is_checked)


def checked(name):
    return overrun(name, is_checked=True)


def lost(name):
    return Outcome(name, "lost", reason="killed from outside")


@pytest.mark.parametrize(
    ("outcomes", "status", "reward", "adapter"),
    [
        ([scored("a", 0.3)], "scored", 0.3, "a"),
        ([scored("a", 0.3), scored("b", 0.7)], "scored", 0.7, "b"),
        ([scored("a", 0.0), unscorable("b")], "scored", 0.0, "a"),
        ([unscorable("a"), scored("b", 0.0)], "scored", 0.0, "b"),
        ([unscorable("a"), unscorable("b")], "unscorable", 0.0, "a"),
        ([failed("a")], "error", 0.0, "a"),
        ([failed("a"), scored("b", 0.9)], "error", 0.0, "a"),
        ([failed("a"), unscorable("b")], "error", 0.0, "a"),
        ([failed("a"), scored("b", 1.0)], "scored", 1.0, "b"),
        ([failed("a"), scored("b", 1.0, max_reward=2.0)], "error", 0.0, "a"),
        ([failed("a"), scored("b", 2.0, max_reward=2.0)], "scored", 2.0, "b"),
        ([failed("a"), failed("b")], "error", 0.0, "a,b"),
        ([scored("a", -1.0), scored("b", -0.5)], "scored", -0.5, "b"),
    ],
)
def test_the_best_verdict_counts_unless_an_error_hides_a_better_one(
    outcomes, status, reward, adapter
):
    verdict = best_verdict(outcomes, seconds=0.5)
    assert (verdict.status, verdict.reward, verdict.adapter) == (status, reward, adapter)
    assert (verdict.reason == "") == (status == "scored")


def test_the_format_reward_belongs_to_the_adapter_that_counts():
    outcomes = [scored("a", 0.1, format_reward=1.0), scored("b", 0.2)]
    assert best_verdict(outcomes, seconds=0.0).format_reward is None
    assert best_verdict(outcomes[:1], seconds=0.0).format_reward == 1.0


@pytest.mark.parametrize(
    ("attempts", "status"),
    [
        ([scored("a", 1.0)], "scored"),
        ([overrun("a"), scored("a", 1.0)], "scored"),
        ([failed("a"), scored("a", 1.0)], "scored"),
        ([overrun("a"), checked("a")], "unscorable"),
        ([overrun("a"), overrun("a")], "error"),
        ([failed("a"), overrun("a")], "error"),
        ([overrun("a"), failed("a")], "error"),
        ([failed("a"), failed("a")], "error"),
        ([lost("a"), scored("a", 1.0)], "scored"),
        ([overrun("a"), lost("a"), checked("a")], "unscorable"),
        ([lost("a"), overrun("a"), lost("a")], "error"),
        ([lost("a")] * MAX_LOST, "error"),
        ([overrun("a"), *[lost("a")] * MAX_LOST], "error"),
    ],
)
def test_only_an_overrun_beside_a_control_in_time_is_the_texts_own_doing(attempts, status):
    settled = settle(attempts)
    assert settled.status == status
    assert settled.reward == (1.0 if status == "scored" else 0.0)


def test_an_error_tells_its_cause_and_a_connection_only_when_nothing_else_is_wrong():
    raised = Outcome("a", "error", reason="no", cause="exception", place="KeyError mine.py:3")
    away = Outcome("b", "error", reason="no", cause="connection", place="OSError mine.py:9")
    for outcomes in ([raised, away], [away, raised]):
        verdict = best_verdict(outcomes, seconds=0.0)
        assert (verdict.cause, verdict.place) == ("exception", "KeyError mine.py:3")
    assert best_verdict([away, scored("c", 0.5)], seconds=0.0).cause == "connection"
    assert best_verdict([away, scored("c", 1.0)], seconds=0.0).cause == ""


@pytest.mark.parametrize(
    ("attempts", "settled"),
    [
        ([], False),
        ([unscorable("a")], True),
        ([failed("a")], False),
        ([failed("a"), overrun("a")], True),
        ([lost("a"), lost("a"), failed("a")], False),
        ([overrun("a"), lost("a")], False),
        ([lost("a")] * (MAX_LOST - 1), False),
        ([lost("a")] * MAX_LOST, True),
    ],
)
def test_a_process_taken_away_does_not_use_up_the_texts_attempts(attempts, settled):
    assert is_settled(attempts) == settled


REPORT = {
    "exit_code": 0,
    "cpu_s": 0.1,
    "memory_mib": 100.0,
    "killed_for": "",
    "is_connected": False,
    "family_cpu_s": 0.1,
}
CONFIG = VerifierConfig(reward_names=("mine",), timeout_s=10.0, memory_mib=1000)


@pytest.mark.parametrize(
    ("report", "status"),
    [
        (REPORT | {"exit_code": -signal.SIGKILL, "cpu_s": 9.5}, "overrun"),
        (REPORT | {"exit_code": -signal.SIGKILL, "memory_mib": 900.0}, "overrun"),
        (REPORT | {"exit_code": -signal.SIGKILL, "killed_for": "time"}, "overrun"),
        (REPORT | {"exit_code": -signal.SIGKILL, "killed_for": "processor"}, "overrun"),
        (REPORT | {"exit_code": -signal.SIGKILL, "killed_for": "answers"}, "error"),
        (REPORT | {"exit_code": -signal.SIGKILL, "killed_for": "processes"}, "overrun"),
        (REPORT | {"exit_code": -signal.SIGKILL}, "lost"),
        (REPORT | {"exit_code": -signal.SIGTERM}, "lost"),
        (REPORT | {"exit_code": -signal.SIGSEGV, "memory_mib": 900.0}, "error"),
        (REPORT | {"exit_code": 3}, "error"),
        ({"failed": "fork: Resource temporarily unavailable"}, "lost"),
        ({}, "lost"),
    ],
)
def test_only_a_limit_that_was_reached_blames_the_text(report, status):
    outcome = classify_end("mine", report, CONFIG)
    assert (outcome.status, outcome.reward, outcome.adapter) == (status, 0.0, "mine")
    assert outcome.reason


@settings(max_examples=200)
@given(
    is_connected=st.booleans(),
    family_cpu_s=st.floats(0.0, 40.0),
    executes_text=st.booleans(),
    killed_for=st.sampled_from(["time", "processor", "processes"]),
)
def test_an_overrun_that_waited_is_a_connections_error_unless_the_text_was_executed(
    is_connected, family_cpu_s, executes_text, killed_for
):
    report = REPORT | {"exit_code": -signal.SIGKILL, "killed_for": killed_for}
    report |= {"is_connected": is_connected, "family_cpu_s": family_cpu_s}
    outcome = classify_end("mine", report, CONFIG, executes_text=executes_text)
    is_idle = family_cpu_s < 5.0  # half of the processor time that it may use
    waited = killed_for == "time" and is_connected and is_idle and not executes_text
    assert (outcome.status, outcome.cause) == (
        ("error", "connection") if waited else ("overrun", "overrun")
    )
    # Only what overran at every attempt can be graded 0.
    again = replace(outcome, is_checked=True)
    assert (settle([outcome, again]).status == "error") == waited
    assert settle([again, overrun("mine"), outcome]).status == "error"
