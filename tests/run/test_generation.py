"""Outputs of a scripted teacher on their way to the file of pairs."""

import asyncio
import json
from contextlib import contextmanager

import numpy as np
import pytest

from async_grpo.config.command_options import GenerateConfig
from async_grpo.run import written_pairs
from async_grpo.run.written_pairs import generate_pairs
from async_grpo.types import Question, Turn
from async_grpo.util.errors import ConfigError, DataError, WorkerError

MODEL = "sample-data/tiny-countdown"
NUM_QUESTIONS = 5


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    lines = [
        {"input": f"use {n} 2 to make 3\n", "answer": n, "nums": [n, 2], "target": 3}
        for n in range(1, NUM_QUESTIONS + 1)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    monkeypatch.setattr(written_pairs, "OfflineTeacher", Scripted)
    monkeypatch.setattr(written_pairs, "CHUNK", 2)

    def config_of(**options):
        return GenerateConfig(
            model_path=MODEL,
            data_path=str(tmp_path / "questions.jsonl"),
            output=str(tmp_path / "pairs.jsonl"),
            **{"max_generation_tokens": 16} | options,
        )

    return config_of


class Scripted:
    """Says its question's number; of the third it finds no end, at the fifth it dies if told."""

    dies = False

    def __init__(self, config, facts, tokenizer, *, longest_prompt):
        self.config = config
        assert longest_prompt == len("use 1 2 to make 3\n")

    def outputs(self, questions):
        if self.dies and 4 in questions:
            raise WorkerError("the engine died")
        return [
            (question, self.turn(ordinal, index))
            for ordinal, question in questions.items()
            for index in range(self.config.samples_per_question)
        ]

    def turn(self, ordinal, index):
        finish_reason = "length" if ordinal == 2 else "stop"
        ids = np.array([9 + ordinal, 1], np.int32)
        return Turn(ids, np.zeros(0, np.float32), (), finish_reason, f"{ordinal} {index}")


def written(config):
    return [json.loads(line) for line in open(config.output)]


def test_the_outputs_that_are_kept_are_the_file_in_the_order_of_the_questions(config_of):
    config, said = config_of(samples_per_question=2), []
    count = generate_pairs(config, say=said.append)
    assert [row["completion"] for row in written(config)] == [
        "0 0", "0 1", "1 0", "1 1", "3 0", "3 1", "4 0", "4 1",
    ]  # fmt: skip
    assert (count.num_kept, dict(count.rejected)) == (8, {"cut at --max-generation-tokens": 2})
    assert [sentence.split(":")[0] for sentence in said] == [
        f"{done} of 5 questions" for done in (2, 4, 5)
    ]


def test_a_limit_takes_the_first_questions(config_of):
    config = config_of(limit=2)
    generate_pairs(config, say=str)
    assert [row["answer"] for row in written(config)] == [1, 2]


@pytest.mark.parametrize("before", [None, "mine"])
def test_what_fails_on_the_way_leaves_the_file_as_it_was(config_of, before, tmp_path, monkeypatch):
    config = config_of()
    if before:
        (tmp_path / "pairs.jsonl").write_text(before)
    monkeypatch.setattr(Scripted, "dies", True)
    with pytest.raises(WorkerError, match="the engine died"):
        generate_pairs(config, say=str)
    kept = {file.name: file.read_text() for file in tmp_path.glob("*pairs*")}
    assert kept == ({"pairs.jsonl": before} if before else {})


def test_a_teacher_of_whom_nothing_is_kept_writes_nothing_and_says_why(config_of, monkeypatch):
    @contextmanager
    def nothing_is_right(config, first):
        yield lambda outputs: [verdict(0.0) for _ in outputs]

    monkeypatch.setattr(written_pairs, "_grading", nothing_is_right)
    with pytest.raises(DataError, match=r"got 0 pairs of 5 outputs; rejected: 4 reward below 1, 1"):
        generate_pairs(config_of(), say=str)


def verdict(reward):
    return written_pairs.Verdict.scored(reward, adapter="scripted")


def test_a_prompt_without_room_for_its_answer_is_refused_with_its_line(config_of):
    with pytest.raises(DataError, match=r"line 1 and 4 more like it, column 'input': expected a p"):
        generate_pairs(config_of(max_generation_tokens=500), say=str)
    with pytest.raises(ConfigError, match=r"--max-generation-tokens must leave room for a prompt"):
        generate_pairs(config_of(max_generation_tokens=10**6), say=str)


def test_the_same_reward_that_grades_a_run_grades_here(config_of):
    """`0 0` is no equation."""
    with pytest.raises(DataError, match=r"rejected: 4 reward below 1, 1 cut at"):
        generate_pairs(config_of(reward_fns="countdown"), say=str)
    with pytest.raises(ConfigError, match=r"--reward-fns must be adapters of reward_registry, got"):
        generate_pairs(config_of(reward_fns="nothing_such"), say=str)


@pytest.mark.parametrize(("is_groupwise", "together"), [(True, 2), (False, 6)])
def test_a_groupwise_reward_is_given_the_outputs_of_one_question_at_a_time(is_groupwise, together):
    class Box:
        groupwise = ("vote",) * is_groupwise

        async def grade(self, samples):
            assert len(samples) == together
            return tuple(verdict(float(sample["output"])) for sample in samples)

    ids = np.arange(2, dtype=np.int32)
    turns = [Turn(ids, np.zeros(2, np.float32), (), "stop", str(n)) for n in range(6)]
    questions = [Question(ids, f"question {n}", None, {}) for n in range(3)]
    outputs = [(questions[n // 2], turn) for n, turn in enumerate(turns)]
    verdicts = asyncio.run(written_pairs._grade(Box(), outputs, num_samples=2))
    assert [each.reward for each in verdicts] == [float(n) for n in range(6)]
