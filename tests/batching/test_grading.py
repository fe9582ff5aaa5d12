"""What the pool's verdicts lead to: warnings, patience with connections, lost groups."""

import asyncio

import pytest
from scripted import make_completion, make_question, make_verdict, run

from async_grpo.batching.failures import (
    MAX_CAUSES,
    Grading,
    SlotFailed,
    WorkProgress,
    require_graded,
)
from async_grpo.types import VerificationRequest, WeightsVersion

QUESTION, COMPLETION = make_question(), make_completion(WeightsVersion(7, 0))
REQUESTS = tuple(VerificationRequest(0, index, QUESTION, COMPLETION) for index in range(3))
GOOD = make_verdict(1.0)
TIMEOUT_S = 100.0


class Pool:
    """Answers with one list of verdicts after the other; the last one again and again."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []  # indices, by call
        self.asked_at = []

    async def verify(self, requests, rewards):
        self.asked.append([request.index for request in requests])
        self.asked_at.append(asyncio.get_running_loop().time())
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def make_grading(pool):
    return Grading(pool.verify, timeout_s=TIMEOUT_S, progress=WorkProgress())


def raised(text, *, place="ValueError mine.py:3", cause="exception"):
    return make_verdict(0.0, status="error", reason=f"mine: {text}", cause=cause, place=place)


def away(text="ConnectionError: refused [mine.py:9]"):
    return raised(text, place="ConnectionError mine.py:9", cause="connection")


def overrun():
    reason = "takes longer than --verifier-timeout-s 3"
    return make_verdict(0.0, status="unscorable", reason=reason, cause="overrun")


def lose(grading):
    with pytest.raises(SlotFailed) as caught:
        require_graded(run(grading.verdicts(REQUESTS)))
    return caught.value.stage, str(caught.value)


def test_the_first_failure_of_each_kind_is_told_and_no_other():
    first, again, other = (
        raised("ValueError: 1 [mine.py:3]"),
        raised("ValueError: 2 [mine.py:3]"),
        raised("ValueError: 3 [mine.py:8]", place="ValueError mine.py:8"),
    )
    grading = make_grading(Pool((GOOD, first, again), (other, again, first)))
    told = "reward mine: ValueError: 1 [mine.py:3]"
    assert lose(grading) == ("verification", told)
    failures = grading.progress.failures
    assert [*failures.values()] == [f"{told}: the groups of such outputs are dropped, and counted"]
    lose(grading)
    assert len(failures) == 2
    assert "ValueError: 3 [mine.py:8]" in [*failures.values()][1]
    assert not grading.warnings


def test_ever_new_failures_do_not_fill_the_console():
    pool = Pool(*([raised(f"{n}", place=f"ValueError mine.py:{n}")] * 3 for n in range(60)))
    grading = make_grading(pool)
    for _ in range(60):
        lose(grading)
    assert len(grading.progress.failures) == MAX_CAUSES


def test_an_overrun_that_counts_as_0_is_told_with_its_option():
    grading = make_grading(Pool((GOOD, overrun(), GOOD)))
    assert [verdict.reward for verdict in run(grading.verdicts(REQUESTS))] == [1.0, 0.0, 1.0]
    (told,) = grading.warnings.values()
    assert told.startswith("reward scripted takes longer than --verifier-timeout-s 3 on an output")
    assert "unscorable, reward 0" in told


def test_a_plain_unscorable_answer_is_told_to_nobody():
    unscorable = make_verdict(0.0, status="unscorable", reason="no answer")
    grading = make_grading(Pool((GOOD, unscorable, GOOD)))
    run(grading.verdicts(REQUESTS))
    assert not grading.warnings


def test_outputs_whose_connection_failed_and_no_others_are_graded_again_until_it_is_back():
    pool = Pool((GOOD, away(), away()), (away(), GOOD), (GOOD,))
    grading = make_grading(pool)
    assert run(grading.verdicts(REQUESTS)) == (GOOD, GOOD, GOOD)
    assert pool.asked == [[0, 1, 2], [1, 2], [1]]
    assert pool.asked_at == [0.0, 0.25, 0.75]
    (told,) = grading.warnings.values()
    assert "refused [mine.py:9]: a connection that it needs fails, it is asked again" in told
    assert "up to --stall-timeout-s 100" in told


def test_a_connection_that_stays_away_loses_the_group_at_the_stall_timeout():
    pool = Pool([away()] * 3)
    grading = make_grading(pool)
    assert lose(grading) == ("verification", "reward mine: ConnectionError: refused [mine.py:9]")
    assert TIMEOUT_S - 6.0 < pool.asked_at[-1] <= TIMEOUT_S
    assert str(grading.progress.problem).startswith("verification: reward mine: ConnectionError")
