import pytest
from script import Script
from scripted import make_question, run
from scripted_run import Run, make_config

from async_grpo.batching.evaluation import SAMPLES_PER_QUESTION
from async_grpo.errors import WorkerError


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


def test_questions_that_could_not_be_graded_are_counted_apart():
    failed = frozenset({0, 3, 4})
    script = make_script(failing=frozenset({0, 3}), dropped=frozenset({4}))
    result, _ = evaluate(script, num_questions=6)
    rewards = [script.rewards(number) for number in set(range(6)) - failed]
    assert (result.num_samples, result.num_failed) == (12, 12)
    assert result.reward_sum == pytest.approx(sum(map(sum, rewards)))


def test_an_evaluation_leaves_the_ledger_and_the_run_alone():
    script = make_script()
    _, running = evaluate(script, num_questions=8)
    counts = running.batcher._ledger.counts()
    assert counts.admitted_slots == 4
    assert counts.samples["failed"] == 0


def test_without_weights_there_is_nothing_to_evaluate():
    with pytest.raises(WorkerError, match="published before an evaluation"):
        run(Run(make_script()).batcher.evaluate())
