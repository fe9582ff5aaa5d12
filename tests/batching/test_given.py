"""Given pairs in the rounds of sampled ones: the same books, D and resumes; no measures."""

import asyncio
import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from effort import histories
from hypothesis import HealthCheck, settings
from hypothesis import given as examples
from hypothesis import strategies as st
from script import Script
from scripted import Registry, run
from scripted_run import Run, make_config, split_steps
from test_batcher_restart import Trainer
from test_histories import identity, scripts

from async_grpo.algorithms.base import LocalRules, ScoreNeed
from async_grpo.algorithms.grpo import Grpo
from async_grpo.batching.failures import MAX_SEQUENTIAL_FAILURES
from async_grpo.batching.ledger import Ledger
from async_grpo.config.roles import teacher
from async_grpo.data.order import MixedOrder, QuestionStream
from async_grpo.telemetry.metrics_row import metrics_row
from async_grpo.types import GivenPair, Minibatch, Question
from async_grpo.util.errors import WorkerError

MATH = teacher("math")
TEACHER_LOGPROB = -2.0
NUM_PAIRS = 11


@pytest.fixture(autouse=True, scope="module")
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def pair(number):
    prompt = np.arange(1 + number % 3, dtype=np.int32)
    completion = np.arange(1 + number, dtype=np.int32)
    question = Question(prompt, f"prompt {number}", None, {"dataset_type": "sums"})
    return GivenPair(question, completion, f"completion {number}")


PAIRS = tuple(map(pair, range(NUM_PAIRS)))


class Taught(Grpo):
    """GRPO beside a term that every token has."""

    def __init__(self, config):
        super().__init__(config)
        self.needs = (*self.needs, ScoreNeed(MATH, of_given=True))

    def contributes(self, sample):
        return sample.num_trained_tokens > 0


class OfTheStep(Taught):
    """Whose advantages wait for all groups of the step."""

    def finish_step(self, groups):
        return [[1.0 for _ in group.samples] for group in groups]


class Teacher:
    def __init__(self, script):
        self.script, self.asked = script, 0

    async def logprobs(self, request):
        self.asked += len(request.output_token_ids)
        await asyncio.sleep(self.script.seconds("teacher", request.num_tokens))
        return tuple(
            np.full(len(ids), TEACHER_LOGPROB, np.float32) for ids in request.output_token_ids
        )


class Mixed(Run):
    """A scripted run of which a share of the slots is given."""

    def __init__(self, script, *, share, algorithm=Taught):
        super().__init__(script)
        self.teacher = Teacher(script)
        self.order = MixedOrder(
            sampled_share=share,
            questions=QuestionStream(7, seed=1),
            pairs=QuestionStream(NUM_PAIRS, seed=1),
            samples_per_slot=self.config.sampling.samples_per_question,
        )
        rules = LocalRules(algorithm(self.config))
        self.plan = replace(self.plan, pairs=PAIRS, pairs_of=self.order.pairs_of, rules=rules)
        self.serve()

    def registries(self):
        of_teacher = Registry(self.teacher, role=MATH) if hasattr(self, "teacher") else None
        return super().registries() | {MATH: of_teacher}


class MixedTrainer(Trainer):
    def __init__(self, script, kills, *, share):
        super().__init__(script, kills)
        self.running = Mixed(script, share=share)


def trained(script, kills=(), *, share):
    return run(MixedTrainer(script, kills, share=share).train(), limit_s=20_000)


def samples_of(step):
    return [sample for items in step[0] for item in items for sample in item.samples]


def whole(samples):
    """{(ordinal, index): a sample}, of which each has one row here, or several."""
    return {(sample.ordinal, sample.index): sample for sample in samples}


@pytest.mark.timeout(1800)
@settings(max_examples=histories(40), deadline=None, suppress_health_check=list(HealthCheck))
@examples(
    scripts(references=({},)), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.lists(st.floats(0.0, 80.0))
)
def test_given_samples_are_trained_once_and_in_nothing_that_is_sampled(script, share, kills):
    """Of any history, and whenever the batcher dies; verifications that fail end other tests."""
    script = replace(script, failing=frozenset(), failing_later=frozenset(), loses_a_lease=False)
    plain, disturbed = trained(script, share=share), trained(script, kills[:3], share=share)
    pairs_of = plain.running.order.pairs_of
    for first, second, key in zip(plain.steps, disturbed.steps, script.steps, strict=True):
        assert sorted(map(identity, samples_of(first))) == sorted(map(identity, samples_of(second)))
        assert (first[1].num_samples, first[1].num_tokens) == (
            second[1].num_samples, second[1].num_tokens
        )  # fmt: skip
        step = script.step(key)
        indices = {
            (ordinal, index): number
            for ordinal in step.ordinals
            for index, number in enumerate(pairs_of(ordinal))
        }
        given = {k: s for k, s in whole(samples_of(first)).items() if s.episode.is_given}
        assert {k: s.num_trained_tokens for k, s in given.items()} == {
            key: len(PAIRS[number].completion_token_ids) for key, number in indices.items()
        }
        assert all((s.scores[MATH] == TEACHER_LOGPROB).all() for s in given.values())
        kept = {k: n for k, (n, _) in step._kept().items() if k not in indices}
        check_end(first[1], given, kept)
        rewards = sum(script.graded(o, step.slots[o][1])[i] for o, i in kept)
        assert first[1].sums.get("reward_sum", 0.0) == rewards
    ledger = disturbed.running.batcher._ledger
    ledger.check()
    assert ledger.in_flight == 0


def check_end(end, given, kept):
    """`given` samples and `kept` tokens of sampled ones: one D, and sums of the sampled alone."""
    given_tokens = sum(sample.num_trained_tokens for sample in given.values())
    assert end.num_samples == len(kept) + len(given)
    assert end.num_tokens == sum(kept.values()) + given_tokens
    assert end.fates["trained"] == len(given) + sum(n > 0 for n in kept.values())
    assert end.sums.get("given_samples", 0) == len(given)
    assert end.sums.get("num_samples", 0) == len(kept)
    assert end.sums.get("sampled_samples", 0) == len(kept)


def test_the_slots_of_a_share_are_given_and_nobody_samples_or_grades_them():
    running = Mixed(Script(config=make_config()), share=0.5)
    items = run(running.train())
    given = {o for o in range(12) if running.order.pairs_of(o)}
    assert len(given) == 6 and set(running.cluster.started) == set(range(12)) - given
    for own in items:
        for sample in (s for item in own if isinstance(item, Minibatch) for s in item.samples):
            assert sample.episode.is_given == (sample.ordinal in given)
            if sample.episode.is_given:
                assert (sample.advantage, sample.question.columns) == (0.0, {})
                (row,) = sample.episode.rows
                prompt = sample.question.input_token_ids
                assert prompt.tolist() == row.prompt_token_ids.tolist()
                assert len(prompt) == 1 + (len(row.token_ids) - 1) % 3


def test_a_batch_of_given_samples_alone_is_trained_and_has_no_reward():
    running = Mixed(Script(config=make_config()), share=0.0)
    items = run(running.train())
    end = split_steps(items[0])[0][1]
    assert not running.cluster.started
    assert (end.num_samples, end.fates["trained"], end.reasons) == (12, 12, {})
    row = metrics_row(end.sums, fates=end.fates, reasons=end.reasons, tokens=end.tokens)
    assert (row["given_samples"], row["num_samples"], row["num_groups"]) == (12, 0, 0)
    for name in ("avg_reward", "avg_output_tokens", "avg_lag", "max_lag", "perc_with_0_advantage"):
        assert row[name] is None
    assert row["perc_failed_samples"] == 0.0
    assert running.served.status().output_tokens == 0


def test_a_resume_in_the_middle_of_a_batch_goes_on_with_the_same_pairs():
    script = Script(config=make_config(batch_size=4, train_minibatch_size=2), num_ranks=1)
    [items] = run(Mixed(script, share=0.5).train())
    first, *steps = split_steps(items)
    again = Mixed(script, share=0.5)
    again.serve(first[1].resume)
    assert Ledger.restore(first[1].resume.ledger).open_slots
    [resumed] = map(split_steps, run(again.train()))
    assert len(resumed) == len(steps) == 5
    for step, same in zip(steps, resumed, strict=True):
        assert step[1].fates["trained"] == same[1].fates["trained"]
        own, other = (
            sorted(identity(s) for m in minibatches for s in m.samples if s.episode.is_given)
            for minibatches, _ in (step, same)
        )
        assert own == other and len(own) == 3


def test_advantages_of_a_whole_step_do_not_wait_for_its_given_slots():
    running = Mixed(Script(config=make_config()), share=0.5, algorithm=OfTheStep)
    items = run(running.train())
    samples = [s for own in items for m in own if isinstance(m, Minibatch) for s in m.samples]
    assert {(s.episode.is_given, s.advantage) for s in samples} == {(True, 0.0), (False, 1.0)}


def test_given_groups_that_work_do_not_hide_that_nothing_else_does():
    config = make_config(num_training_batches=100, max_staleness=0)
    script = Script(config=config, dropped=frozenset(range(1000)), slowest_s=0.1)
    running = Mixed(script, share=0.5)
    with pytest.raises(WorkerError, match=r"32 questions in a row failed"):
        run(running.train())
    assert len(running.cluster.started) == MAX_SEQUENTIAL_FAILURES


def test_a_dumped_line_says_that_it_was_given_and_has_no_reward(tmp_path):
    config = make_config(
        output_dir=str(tmp_path), dump_samples_filename="samples.jsonl", dump_token_columns=True
    )
    run(Mixed(Script(config=config), share=0.5).train())
    lines = list(map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines()))
    given = [line for line in lines if line["given"]]
    assert (len(lines), len(given)) == (36, 18)
    for line in given:
        number = line["input"].removeprefix("prompt ")
        assert line["output"] == f"completion {number}"
        assert (line["reward"], line["advantage"], line["verdict"]) == (None, None, None)
        assert (line["fate"], line["num_output_tokens"]) == ("trained", 0)
        assert len(line["output_token_ids"][0]) == 1 + int(number)
        assert line["behaviour_logprobs"] == [None]
