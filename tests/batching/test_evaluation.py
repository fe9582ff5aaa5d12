"""Held-out questions, graded beside the run."""

import asyncio
from dataclasses import replace

import pytest
from script import Script
from scripted import make_question, run
from scripted_run import INCARNATION, ROWS, Run, make_config

from async_grpo.batching import evaluation as module
from async_grpo.batching.evaluation import SAMPLES_PER_QUESTION
from async_grpo.environments.base import EpisodeFailed, FailureClass
from async_grpo.errors import NoWorkerError, WorkerError
from async_grpo.types import WeightsVersion


def evaluate(script, *, num_questions):
    """What the batcher answers after the first weights, and the run."""
    running = Run(script, held_out=tuple(make_question() for _ in range(num_questions)))

    async def scenario():
        await running.publish(0)
        return await running.batcher.evaluate()

    return run(scenario()), running


def make_script(**changes):
    config = make_config(samples_per_question=SAMPLES_PER_QUESTION, num_training_batches=1)
    return Script(config=config, **changes)


def test_rewards_and_correct_answers_are_counted():
    script = make_script(seed=4)
    result, _ = evaluate(script, num_questions=20)
    rewards = [script.rewards(number) for number in range(20)]
    assert (result.num_questions, result.num_samples, result.num_failed) == (20, 80, 0)
    assert result.reward_sum == pytest.approx(sum(map(sum, rewards)))
    assert result.num_correct == sum(group.count(1.0) for group in rewards)
    assert result.num_solved == sum(1.0 in group for group in rewards)
    assert 0 < result.num_solved < 20


def test_questions_are_played_in_the_environment_of_their_type():
    kinds = ("rows", "plain", "rows", "other")
    questions = [replace(make_question(), dataset_type=kind) for kind in kinds]
    running = Run(make_script(seed=4), held_out=tuple(questions))
    environments = {"rows": ROWS, "plain": None}
    running.plan = replace(running.plan, environment=ROWS, environments=environments)
    running.batcher, play = running.make_batcher(), running.cluster.play
    played = []

    async def watched(request):
        played.append((request.question.dataset_type, request.seed))
        if request.ordinal == 3:
            raise EpisodeFailed(FailureClass.TOOL, "the index is down")
        return await play(request)

    running.cluster.play = watched
    running.cluster.version = version = WeightsVersion(INCARNATION, 0)
    result = run(module.evaluate(running.plan, running.batcher._pipeline, version=version))
    assert sorted(played) == [("other", 3), ("rows", 0), ("rows", 2)]
    assert (result.num_samples, result.num_failed) == (12, 4)
    rewards = [running.script.rewards(number) for number in range(3)]
    assert result.reward_sum == pytest.approx(sum(map(sum, rewards)))


def test_questions_that_could_not_be_graded_are_counted_apart():
    failed = frozenset({0, 3, 4})
    script = make_script(failing=frozenset({0, 3}), dropped=frozenset({4}))
    result, _ = evaluate(script, num_questions=6)
    rewards = [script.rewards(number) for number in set(range(6)) - failed]
    assert (result.num_samples, result.num_failed) == (12, 12)
    assert result.reward_sum == pytest.approx(sum(map(sum, rewards)))


def test_a_first_evaluation_in_which_nothing_could_be_graded_ends_the_run():
    everything = frozenset(range(6))
    with pytest.raises(WorkerError, match="none of the held-out questions could be: reward scr"):
        evaluate(make_script(failing=everything), num_questions=6)


def test_a_later_evaluation_ends_nothing():
    running = Run(make_script(failing=frozenset(range(6))), held_out=(make_question(),))
    running.cluster.version = version = WeightsVersion(INCARNATION, 1)
    result = run(module.evaluate(running.plan, running.batcher._pipeline, version=version))
    assert (result.num_samples, result.num_failed) == (0, 4)


def test_an_evaluation_leaves_the_ledger_and_the_run_alone():
    script = make_script()
    _, running = evaluate(script, num_questions=8)
    ledger = running.batcher._ledger
    assert ledger.admitted_slots == 4
    assert ledger.fates.samples["failed"] == 0


def test_workers_that_fail_or_die_cost_an_evaluation_nothing_but_time():
    plain, _ = evaluate(make_script(), num_questions=8)
    script = make_script(flaky=frozenset(range(8)))
    flaky, running = evaluate(script, num_questions=8)
    assert running.cluster.tries[7, 0] == 2
    assert replace(flaky, seconds=plain.seconds) == plain


def test_a_held_out_question_that_kills_workers_fails_alone_and_excludes_no_other():
    result, running = evaluate(make_script(deadly=frozenset({5})), num_questions=7)
    assert (result.num_samples, result.num_failed) == (24, 4)
    assert running.batcher._quarantine.questions == ()


def test_a_held_out_question_that_no_worker_takes_in_time_is_counted():
    running = Run(make_script(), held_out=tuple(make_question() for _ in range(3)))
    lease = running.generation.lease

    def too_late(*cost, **options):
        if len(running.generation.asked) == 6:
            raise NoWorkerError("nobody was free")
        return lease(*cost, **options)

    running.generation.lease = too_late

    async def scenario():
        await running.publish(0)
        await asyncio.sleep(50.0)  # the four slots of the run have had their leases
        return await running.batcher.evaluate()

    result = run(scenario())
    assert (result.num_samples, result.num_failed) == (8, 4)


def test_without_weights_there_is_nothing_to_evaluate():
    with pytest.raises(WorkerError, match="published before an evaluation"):
        run(Run(make_script()).batcher.evaluate())
