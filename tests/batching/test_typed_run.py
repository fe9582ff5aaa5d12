"""A run over several types: what each step says of them, and what evaluations do."""

from dataclasses import replace

import pytest
from script import Script
from scripted import run
from scripted_run import QUESTIONS, Run, make_config, split_steps

from async_grpo.config.evaluation_sets import SAMPLES_PER_QUESTION
from async_grpo.data.order import QuestionStream, TypedQuestions
from async_grpo.telemetry.metrics_row import metrics_row
from async_grpo.types import SamplingContract
from async_grpo.util.errors import WorkerError

TYPES = ("sums", "odes", "jokes")
SIZE = len(QUESTIONS) // 3
WEIGHTS = (2, 1, 1)


def typed_run(*, held_out=(), batches=3, **script):
    data = "sums=s.jsonl,rewards=countdown;odes=o.jsonl;jokes=j.jsonl"
    changes = {"data_path": "", "data": data, "batch_size": 8, "samples_per_question": 4}
    changes["num_training_batches"] = batches
    running = Run(Script(config=make_config(**changes), **script), held_out=held_out)
    questions = TypedQuestions(
        [QuestionStream(SIZE, seed=kind) for kind in range(3)], weights=WEIGHTS, batch_size=8
    )
    typed = [replace(QUESTIONS[n], dataset_type=TYPES[n // SIZE]) for n in range(3 * SIZE)]
    running.plan = replace(
        running.plan,
        questions=typed,
        order=questions.index,
        replacement=questions.replacement,
        sampling=SamplingContract(1.0, (1,), 12),
    )
    running.serve()
    return running


def rows_of(running):
    items = run(running.train())[0]
    return [
        metrics_row(end.sums, fates=end.fates, reasons=end.reasons, tokens=end.tokens)
        for _, end in split_steps(items)
    ]


def test_every_step_says_of_each_type_what_it_says_of_all():
    failing = frozenset({2, 9})
    running = typed_run(seed=3, failing=failing)
    rows = rows_of(running)
    kinds = [running.plan.type_of(ordinal) for ordinal in range(24)]
    for batch, row in enumerate(rows):
        slots = range(8 * batch, 8 * batch + 8)
        for kind, num_slots in zip(TYPES, (4, 2, 2), strict=True):
            own = [ordinal for ordinal in slots if kinds[ordinal] == kind]
            graded = [ordinal for ordinal in own if ordinal not in failing]
            assert len(own) == num_slots
            rewards = [r for ordinal in graded for r in running.script.rewards(ordinal, 0)]
            assert row[f"num_samples/{kind}"] == len(rewards)
            assert row[f"num_groups/{kind}"] == len(graded)
            assert row[f"perc_failed_samples/{kind}"] == 1 - len(graded) / len(own)
            if rewards:
                mean = sum(rewards) / len(rewards)
                assert row[f"avg_reward/{kind}"] == pytest.approx(mean)
                correct = sum(reward >= 1 for reward in rewards) / len(rewards)
                assert row[f"perc_correct_samples/{kind}"] == correct
        for total in ("num_samples", "num_groups"):
            assert row[total] == sum(row[f"{total}/{kind}"] for kind in TYPES)


def test_the_outputs_of_a_question_are_graded_together_by_the_rewards_of_its_type(monkeypatch):
    running = typed_run(seed=3)
    asked = {}
    verify = running.cluster.verify

    async def recorded(request):
        asked[request.outputs[0].ordinal] = (request.rewards, len(request.outputs))
        return await verify(request)

    monkeypatch.setattr(running.cluster, "verify", recorded)
    rows_of(running)
    names = {"sums": ("countdown",), "odes": (), "jokes": ()}
    kinds = [running.plan.type_of(ordinal) for ordinal in range(24)]
    assert asked == {ordinal: (names[kind], 4) for ordinal, kind in enumerate(kinds)}


def test_a_run_without_types_says_nothing_of_them():
    rows = rows_of(Run(Script(config=make_config(), seed=3)))
    assert not any("/" in key for row in rows for key in row)


def test_a_type_of_which_nothing_comes_to_an_end_ends_the_run_of_several():
    """Two groups of `odes` a batch: eight have failed with the fourth."""
    kinds = typed_run(batches=6).plan
    dead = frozenset(n for n in range(48) if kinds.type_of(n) == "odes")
    running = typed_run(batches=6, failing=dead)
    said = r"none of the 8 groups of type 'odes' in 4 batches in a row could be: reward scripted"
    with pytest.raises(WorkerError, match=said):
        run(running.train())
    assert running.num_published < 6


def test_a_type_that_has_one_good_group_in_time_ends_no_run():
    kinds = typed_run(batches=6).plan
    dead = [n for n in range(48) if kinds.type_of(n) == "odes"]
    running = typed_run(batches=6, failing=frozenset({*dead} - {dead[4]}))
    assert len(split_steps(run(running.train())[0])) == 6


def test_an_evaluation_counts_each_type_of_its_own():
    held_out = [replace(QUESTIONS[n], dataset_type=TYPES[n % 2]) for n in range(6)]
    running = typed_run(seed=4, held_out=held_out, dropped=frozenset({1}))

    async def scenario():
        await running.publish(0)
        return await running.served.evaluations.finished()

    (result,) = run(scenario())
    assert {*result.by_type} == {"sums", "odes"}
    for field in ("num_questions", "num_samples", "num_failed", "num_correct", "num_solved"):
        parts = [getattr(own, field) for own in result.by_type.values()]
        assert getattr(result, field) == sum(parts)
    assert result.by_type["odes"].num_failed == SAMPLES_PER_QUESTION
    rewards = [reward for n in (0, 2, 4) for reward in running.script.rewards(n)]
    assert result.by_type["sums"].reward_sum == pytest.approx(sum(rewards))
