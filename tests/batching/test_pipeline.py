import asyncio

import numpy as np
import pytest
from scripted import make_completion, make_verdict, run
from staged import (
    NEWER,
    OLDEST,
    QUESTION,
    REFERENCE,
    REQUEST,
    SCORED,
    SCORES,
    STEP,
    TIMEOUT_S,
    Stage,
    Worker,
    group,
)

from async_grpo.batching.failures import QUARANTINE_DEATHS, SlotFailed
from async_grpo.batching.leased_work import MAX_REVOCATIONS, TRIES_AFTER_S
from async_grpo.types import VersionSpan, WeightsVersion
from async_grpo.util.errors import ProcessLostError, StaleAnswerError, WorkerError


def test_a_group_has_everything_that_the_loss_needs():
    stage = Stage(reference=Worker(SCORES))
    finished = stage.run()
    assert (finished.ordinal, finished.attempt) == (5, 0)
    assert [sample.index for sample in finished.samples] == [0, 1]
    assert [sample.advantage for sample in finished.samples] == [0.5, -0.5]
    assert [sample.verdict.reward for sample in finished.samples] == [1.0, 0.0]
    assert all(sample.question is QUESTION for sample in finished.samples)
    assert all(
        np.array_equal(sample.scores["reference"], scores)
        for sample, scores in zip(finished.samples, SCORES, strict=True)
    )


def test_leases_ask_for_the_right_load_and_weights():
    worker = Worker(SCORES)
    stage = Stage(reference=worker)
    stage.run()
    assert stage.generation.asked == [(2, OLDEST)]
    assert stage.reference.asked == [(3 + 4 + 3 + 5, REFERENCE)]
    (request,) = worker.requests
    assert (request.version, request.temperature) == (REFERENCE, 0.7)
    assert [len(ids) for ids in request.output_token_ids] == [4, 5]


def test_without_reference_workers_nothing_is_scored():
    assert [sample.scores for sample in Stage().run().samples] == [{}, {}]


def test_the_samples_of_a_slot_are_counted_in_the_stage_they_are_in():
    stage = Stage(reference=Worker(SCORES))
    seen = []

    async def look():
        for second in range(3):
            await asyncio.sleep(0.5 + (second > 0) * 0.5)
            seen.append(+stage.pipeline.stages.counts)

    async def scenario():
        slot = stage.pipeline.run(QUESTION, REQUEST, STEP, oldest=OLDEST, account=stage.books)
        await asyncio.gather(slot, look())

    run(scenario())
    assert seen == [{"generating": 2}, {"verifying": 2}, {"in_reference": 2}]


@pytest.mark.parametrize(
    "answer",
    [
        WorkerError("the engine died"),
        StaleAnswerError("wrong weights"),
        group(num_samples=1),
        group(WeightsVersion(7, 2)),
        group(WeightsVersion(6, 9)),
        group(WeightsVersion(8, 3)),
        (*group()[:1], make_completion(OLDEST, spans=(VersionSpan(OLDEST, 0, 3),))),
    ],
)
def test_a_bad_answer_is_tried_again_on_another_lease(answer):
    bad, good = Worker(answer), Worker(group(NEWER))
    stage = Stage(workers=[bad, good])
    assert len(stage.run().samples) == 2
    assert (len(bad.requests), len(good.requests)) == (1, 1)
    assert stage.pipeline.workers.progress.problem is None


def test_a_completion_whose_first_tokens_are_stale_is_refused():
    spans = (VersionSpan(WeightsVersion(7, 2), 0, 1), VersionSpan(OLDEST, 1, 4))
    stale = (make_completion(OLDEST), make_completion(OLDEST, spans=spans))
    stage, message = Stage(Worker(stale)).failure()
    assert stage == "generation"
    assert "7.2 came back, 7.3 or later were asked" in message


def test_the_answer_of_a_revoked_lease_is_refused():
    zombie, good = Worker(group()), Worker(group(NEWER))
    stage = Stage(workers=[zombie, good])
    stage.generation.revoked.add(0)
    finished = stage.run()
    assert finished.samples[0].episode.rows[0].weights_versions[0].version == NEWER
    assert len(stage.generation.asked) == 2


def test_the_last_reason_is_told_when_every_try_failed():
    workers = [Worker(WorkerError("out of memory")), Worker(group(NEWER, 1)), Worker(group())]
    stage = Stage(workers=[workers[0], workers[1], workers[0]])
    assert stage.failure() == (
        "generation",
        "generation failed 3 times, the last time: out of memory",
    )
    assert "out of memory" in stage.pipeline.workers.progress.problem.reason


def test_lost_leases_use_up_no_try_of_their_own_but_have_an_end():
    stage = Stage()
    stage.generation.revoked |= set(range(MAX_REVOCATIONS - 1))
    assert len(stage.run().samples) == 2
    stage = Stage()
    stage.generation.revoked |= set(range(MAX_REVOCATIONS))
    assert stage.failure() == (
        "generation",
        f"generation failed {MAX_REVOCATIONS} times, the last time: "
        f"lease {MAX_REVOCATIONS - 1} has ended: no sign of life",
    )


def test_the_last_try_waits_until_a_worker_in_trouble_has_been_missed():
    stage, clock = Stage(Worker(WorkerError("died"), seconds=0.0)), []

    async def scenario():
        with pytest.raises(SlotFailed):
            await stage.pipeline.play(QUESTION, REQUEST, oldest=OLDEST, account=stage.books)
        clock.append(asyncio.get_running_loop().time())

    run(scenario())
    assert clock[0] == pytest.approx(sum(TRIES_AFTER_S))
    assert TRIES_AFTER_S[-1] > 5.0  # the registry's interval between pings


def test_nothing_but_its_lease_bounds_an_answer():
    slow = Worker(group(), seconds=TIMEOUT_S * 10)
    stage = Stage(slow, reference=Worker(SCORES, seconds=TIMEOUT_S * 10))
    assert len(stage.run().samples) == 2
    assert len(slow.requests) == 1


def test_a_group_that_takes_longer_than_the_user_wants_is_sampled_once_and_dropped():
    slow = Worker(group(), seconds=TIMEOUT_S)
    stage = Stage(slow, generation_timeout_s=30.0)
    assert stage.failure() == (
        "generation timeout",
        "generation worker w0 did not answer within 30 s (--generation-timeout-s)",
    )
    assert len(slow.requests) == 1
    assert len(Stage(Worker(group(), seconds=29.0), generation_timeout_s=30.0).run().samples) == 2


def test_workers_are_told_the_lease_that_they_work_for():
    generation, reference = Worker(group()), Worker(SCORES)
    stage = Stage(generation, reference=reference)
    stage.generation.asked, stage.reference.asked = [None] * 5, [None] * 9
    stage.run()
    assert [request.lease_id for request in (*generation.requests, *reference.requests)] == [5, 9]


def test_a_verifier_that_failed_loses_the_whole_group():
    broken = make_verdict(0.0, status="error", reason="scripted: killed after 10 s")
    stage = Stage(verdicts=Worker((make_verdict(1.0), broken)))
    assert stage.failure() == ("verification", "reward scripted: killed after 10 s")


def test_verifiers_that_can_grade_nothing_lose_the_group():
    stage = Stage(verdicts=Worker(WorkerError("no process starts")))
    assert stage.failure() == (
        "verification",
        "verification failed 3 times, the last time: no process starts",
    )


def test_a_verifier_that_dies_is_replaced_and_no_question_is_suspected():
    stage = Stage(verdicts=Worker(*[ProcessLostError("gone")] * QUARANTINE_DEATHS, SCORED))
    assert len(stage.run().samples) == 2
    assert len(stage.generation.asked) == 1


def test_an_unscorable_answer_is_a_reward_of_0():
    unscorable = make_verdict(0.0, status="unscorable", reason="no \\boxed{}")
    finished = Stage(verdicts=Worker((make_verdict(1.0), unscorable))).run()
    assert [sample.advantage for sample in finished.samples] == [0.5, -0.5]


def test_a_reference_that_fails_every_time_loses_the_group():
    stage = Stage(reference=Worker(StaleAnswerError("reference weights 7.0 were asked")))
    name, message = stage.failure()
    assert (name, "reference weights 7.0 were asked" in message) == ("reference", True)


BAD_SCORES = {
    "of [4] tokens came back, [4, 5]": SCORES[:1],
    "of [5, 4] tokens came back, [4, 5]": SCORES[::-1],
    "must be finite": (SCORES[0], np.full(5, -np.inf, np.float32)),
}


@pytest.mark.parametrize(("message", "scores"), BAD_SCORES.items())
def test_scores_that_cannot_be_used_are_asked_for_again_and_lose_the_group_in_the_end(
    message, scores
):
    stage, reason = Stage(reference=Worker(scores)).failure()
    assert (stage, message in reason) == ("reference", True)
    assert Stage(reference=Worker(scores, SCORES)).run()


@pytest.mark.parametrize("why", [(), ("worker died",)])
def test_every_group_counts_among_those_of_which_some_were_sampled_again(why):
    stage = Stage()
    stage.books.resampled.update(why)
    for _ in range(2):
        stage.pipeline.sampled(stage.books)
    counts = {
        name: n for name, n in stage.pipeline.take_clock().items() if "sampled_groups" in name
    }
    expected = {"sampled_groups": 2, "resampled_groups": 2 * len(why)}
    assert counts == expected | {f"resampled_groups_{each}": 2 for each in why}
