"""Whole runs with teachers, in a clock that jumps: rounds, lost payloads, room and books."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest
from effort import histories
from hypothesis import HealthCheck, settings
from hypothesis import given as examples
from hypothesis import strategies as st
from script import Script
from scripted import run
from scripted_run import Run, make_config, split_steps
from taught import LEARNS, LOGPROBS, MATH, SIZES, Teacher, TeacherRegistry

from async_grpo.batching.failures import SlotFailed
from async_grpo.types import EndOfStep, Minibatch
from async_grpo.util.errors import ProcessLostError, WorkerError

ROOM = {"nearly none": 1e-9, "a group": 4e-6, "enough": 1.0}  # GiB


class TaughtRun(Run):
    """All questions have one teacher, of whom there may be several workers."""

    def __init__(self, script, *errors):
        self.teachers = [Teacher(MATH, *errors), Teacher(MATH)]
        super().__init__(script)

    def registries(self):
        self.taught = TeacherRegistry(*self.teachers, role=MATH)
        return super().registries() | {MATH: self.taught}

    def serve(self, resume=None):
        questions = [replace(q, dataset_type="sums") for q in self.plan.questions]
        self.plan = replace(self.plan, questions=tuple(questions))
        super().serve(resume)

    @property
    def buffer(self):
        return self.served.pipeline.scoring.payloads


def taught_config(**options):
    return make_config(**(LEARNS | {"teacher_for": "math"} | options))


@settings(max_examples=histories(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@examples(
    room=st.sampled_from(list(ROOM.values())),
    num_ranks=st.integers(1, 3),
    deterministic=st.booleans(),
    max_staleness=st.integers(0, 2),
    timing=st.integers(0, 1000),
    payload=st.sampled_from(["topk", "hidden", "logits"]),
)
def test_however_little_room_there_is_all_is_trained_and_none_is_held_at_the_end(
    room, num_ranks, deterministic, max_staleness, timing, payload
):
    config = taught_config(
        teacher_buffer_gib=room,
        deterministic=deterministic,
        max_staleness=0 if deterministic else max_staleness,
        teacher_payload=payload,
    )
    school = TaughtRun(Script(config=config, num_ranks=num_ranks, timing=timing))
    ranks = run(school.train())
    samples = [s for rank in ranks for item in rank if isinstance(item, Minibatch)
               for s in item.samples]  # fmt: skip
    per_step = config.batching.batch_size * config.sampling.samples_per_question
    assert len({s.key for s in samples}) == len(samples) == 3 * per_step
    assert all(len(s.tickets) == 1 and s.tickets[0].teacher == MATH for s in samples)
    assert all(set(s.scores["teacher"].tolist()) == {LOGPROBS[MATH]} for s in samples)
    ends = [item for item in ranks[0] if isinstance(item, EndOfStep)]
    tokens = sum(s.num_tokens - len(s.question.input_token_ids) for s in samples)
    assert sum(end.sums["teacher_tokens"] for end in ends) == tokens
    assert sum(end.sums["teacher_bytes"] for end in ends) == sum(
        s.tickets[0].num_bytes for s in samples
    )
    assert sum(end.clock["lost_payloads"] for end in ends) == 0
    assert school.buffer.num_bytes == 0


def test_a_worker_of_a_teacher_that_fails_now_and_then_costs_no_sample():
    errors = (ProcessLostError("its process has ended"), WorkerError("out of memory"), None)
    school = TaughtRun(Script(config=taught_config()), *errors)
    (items, _) = run(school.train())
    assert [end.fates["trained"] for _, end in split_steps(items)] == [12] * 3
    assert sum(end.clock["reference_retries"] for _, end in split_steps(items)) == 2 * 3
    assert school.buffer.num_bytes == 0


async def first_answers(school):
    """What the ranks are given first, once all of it is there."""
    await school.publish(0)
    asked = [school.batcher.next_items(rank, 0) for rank in range(school.script.num_ranks)]
    return await asyncio.gather(*asked)


def test_the_rank_that_lost_payloads_gets_the_same_round_with_new_tickets_for_these():
    school = TaughtRun(Script(config=taught_config(deterministic=True, max_staleness=0)))

    async def scenario():
        own, other = await first_answers(school)
        asked = sum(len(worker.asked) for worker in school.teachers)
        lost = [sample.key for sample in own[0].samples[:2]]
        again = await school.batcher.taught_again(0, 0, lost)
        assert sum(len(worker.asked) for worker in school.teachers) == asked + 1
        repeated = await school.batcher.next_items(0, 0)
        same = await school.batcher.next_items(1, 0)
        held = school.buffer.num_bytes
        return own, other, again, repeated, same, lost, held

    own, other, again, repeated, same, lost, held = run(scenario())
    assert [s.key for s in again.samples] == [s.key for s in own[0].samples]
    assert again.round_index == own[0].round_index
    for old, new in zip(own[0].samples, again.samples, strict=True):
        if old.key in lost:
            assert new.tickets[0].reference[0] is not old.tickets[0].reference[0]
        else:
            assert new is old
    assert repeated == (again, *own[1:])  # whoever asks again does not get the lost ones again
    assert same is other
    tickets = [s.tickets[0].num_bytes for rank in (own, other) for s in rank[0].samples]
    assert held >= sum(tickets)


def test_what_was_lost_is_counted_in_its_step():
    class Losing(TaughtRun):
        async def rank(self, rank):
            self.lost = getattr(self, "lost", 0)
            real = self.batcher.next_items

            async def next_items(rank, index):
                items = await real(rank, index)
                if index == 0 and isinstance(items[0], Minibatch) and items[0].samples:
                    keys = [sample.key for sample in items[0].samples[:2]]
                    self.lost += len(keys)
                    await self.batcher.taught_again(rank, 0, keys)
                    items = await real(rank, index)
                return items

            self.batcher.next_items = next_items
            return await super().rank(rank)

    school = Losing(Script(config=taught_config(), num_ranks=1))
    (items,) = run(school.train())
    counts = [end.clock["lost_payloads"] for _, end in split_steps(items)]
    assert sum(counts) == school.lost > 0
    assert [end.fates["trained"] for _, end in split_steps(items)] == [12] * 3
    # Scored again, they are no further tokens, and hold no further room.
    tokens = sum(end.sums["teacher_tokens"] for _, end in split_steps(items))
    samples = [s for minibatches, _ in split_steps(items) for m in minibatches for s in m.samples]
    assert tokens == sum(s.num_tokens - len(s.question.input_token_ids) for s in samples)
    assert school.buffer.num_bytes == 0


def test_what_goes_by_express_is_counted_and_takes_no_room():
    config = taught_config(teacher_payload="logits", express="1x1")
    school = TaughtRun(Script(config=config))
    items, others = run(school.train())
    assert not any(worker.asked for worker in school.teachers)
    samples = [s for rank in (items, others) for item in rank if isinstance(item, Minibatch)
               for s in item.samples]  # fmt: skip
    tokens = sum(s.num_tokens - len(s.question.input_token_ids) for s in samples)
    ends = [end for _, end in split_steps(items)]
    assert sum(end.sums["teacher_tokens"] for end in ends) == tokens > 0
    trained, (_, item_size, _) = sum(s.num_trained_tokens for s in samples), SIZES[MATH]
    sent = sum(end.sums["teacher_bytes"] for end in ends)
    width = min(SIZES[MATH][2], school.plan.vocab_size)
    assert sent == trained * item_size * width > 0
    assert school.buffer.num_bytes == 0


def test_a_payload_that_nobody_can_make_again_is_an_error_of_the_rank():
    school = TaughtRun(
        Script(config=taught_config(deterministic=True, max_staleness=0), num_ranks=1)
    )

    async def scenario():
        ((item, *_),) = await first_answers(school)
        for worker in school.teachers:
            worker.errors = [WorkerError("out of memory")]
        await school.batcher.taught_again(0, 0, [item.samples[0].key])

    with pytest.raises(SlotFailed, match="failed 3 times, the last time: out of memory"):
        run(scenario())


def test_a_run_that_goes_on_counts_from_its_cut():
    config = taught_config(train_minibatch_size=2)  # two steps a batch
    school = TaughtRun(Script(config=config, num_ranks=1))
    (items,) = run(school.train())
    end = split_steps(items)[2][1]
    assert (end.batch, end.step_in_batch) == (1, 0)
    run(made_on(partial(school.serve, end.resume)))
    assert school.buffer.step == 3


async def made_on(make):
    return make()
