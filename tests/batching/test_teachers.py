"""Whose sample it is, what a teacher is asked of it, and the room that its payload has."""

import asyncio

import numpy as np
import pytest
from effort import histories
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st
from taught import (
    CODE,
    LOGPROBS,
    MATH,
    SIZES,
    STUDENT_VOCAB,
    School,
    Teacher,
    given,
    sampled,
)

from async_grpo.batching.failures import SlotFailed
from async_grpo.types import Payload, without_texts
from async_grpo.util.errors import ProcessLostError, WorkerError

MIXED = ("sums", "programs", "sums", "programs")
OF_TOP_K = 8 * 5 + 4  # bytes a token


def held(group):
    return sum(ticket.num_bytes for sample in group.samples for ticket in sample.tickets)


def test_the_dataset_type_of_a_line_chooses_its_teacher():
    school = School()
    group = school.run(school.finish(sampled(0, "programs")))
    assert (school.requests(MATH), len(school.requests(CODE))) == ([], 1)
    (request,) = school.requests(CODE)
    assert request.payload == Payload("topk", 5, 1.0)
    assert (request.temperature, request.version) == (0.7, None)
    assert request.vocab_size == STUDENT_VOCAB
    for sample in group.samples:
        assert sample.scores["teacher"].tolist() == [LOGPROBS[CODE]] * sample.num_trained_tokens
        (ticket,) = sample.tickets
        assert (ticket.teacher, ticket.num_bytes) == (CODE, OF_TOP_K * sample.num_trained_tokens)
    references = [sample.tickets[0].reference[0] for sample in group.samples]
    assert references[0] is not references[1]


def test_a_type_of_nobody_s_goes_to_the_teacher_of_all_others_or_nowhere():
    school = School(teacher_for="programs=code,math")
    school.run(school.finish(sampled(0, "poems")))
    assert (len(school.requests(MATH)), school.requests(CODE)) == (1, [])
    school = School()
    with pytest.raises(WorkerError, match="names no teacher of the dataset_type 'poems'"):
        school.run(school.finish(sampled(0, "poems")))


@pytest.mark.parametrize(
    ("payload", "per_token"),
    [
        ("topk", {MATH: OF_TOP_K, CODE: OF_TOP_K}),
        ("hidden", {role: hidden * item for role, (hidden, item, _) in SIZES.items()}),
        ("logits", {MATH: 4 * STUDENT_VOCAB, CODE: 2 * SIZES[CODE][2]}),
    ],
)
def test_a_ticket_says_how_many_bytes_its_payload_has(payload, per_token):
    school = School(teacher_payload=payload)
    group = school.run(school.finish(given(0, *MIXED)))
    for sample, kind in zip(group.samples, MIXED, strict=True):
        role = {"sums": MATH, "programs": CODE}[kind]
        (ticket,) = sample.tickets
        assert ticket.num_bytes == per_token[role] * sample.num_trained_tokens
        assert sample.scores["teacher"].tolist() == [LOGPROBS[role]] * sample.num_trained_tokens
    assert school.buffer.num_bytes == held(group)


def test_the_size_is_known_while_a_teacher_that_was_there_is_replaced():
    school = School(teacher_payload="hidden")
    first = school.run(school.finish(sampled(0, "sums")))
    school.registries[MATH].is_empty = True
    second = school.run(school.finish(sampled(1, "sums")))
    assert held(second) == held(first) > 0


def test_log_probabilities_alone_need_no_ticket_and_no_room():
    school = School(gkd_coefficient=0.0, gkd_top_k=64, opd_coefficient=1.0)
    group = school.run(school.finish(sampled(0, "sums")))
    assert [method for method, _ in school.workers[MATH][0].asked] == ["logprobs"]
    assert not any(sample.tickets for sample in group.samples)
    assert all("teacher" in sample.scores for sample in group.samples)
    assert school.buffer.num_bytes == 0


EXPRESS = {"teacher_for": "math", "teacher_payload": "logits", "express": "1x2"}


def test_with_express_no_teacher_is_asked_but_for_what_the_ranks_have_lost():
    school = School(**EXPRESS)
    group = school.run(school.finish(sampled(0, "sums")))
    assert school.requests(MATH) == []
    assert not any(sample.tickets or sample.scores for sample in group.samples)
    lost = without_texts(group.samples[:1])
    (again,) = school.run(school.pipeline.scoring.taught_again(lost))
    (request,) = school.requests(MATH)
    assert request.payload == Payload("logits", 0, 1.0)
    assert (len(again.tickets), set(again.scores["teacher"].tolist())) == (1, {LOGPROBS[MATH]})
    assert school.buffer.num_bytes == 0


@pytest.mark.parametrize(("largest", "is_asked"), [(89, False), (90, True)])
def test_a_token_that_a_teacher_of_express_lacks_is_left_to_the_teacher_to_refuse(
    largest, is_asked
):
    school = School(**(EXPRESS | {"teacher_for": "code"}))
    group = sampled(0, "sums")
    for sample in group.samples:
        sample.episode.rows[0].token_ids[-1] = largest
    school.run(school.finish(group))
    assert len(school.requests(CODE)) == is_asked


@settings(max_examples=histories(60), deadline=None)
@examples(
    st.lists(st.lists(st.sampled_from(["sums", "programs"]), min_size=1, max_size=4), max_size=8),
    st.integers(0, 1000),
)
def test_groups_of_pairs_with_several_teachers_never_wait_for_each_other_s_rest(slots, limit):
    """Each is fetched once it is whole: with any room at all, all come to their end."""
    school = School(limit=limit)

    async def slot(ordinal, kinds):
        group = await school.finish(given(ordinal, *kinds))
        assert held(group) <= school.buffer.num_bytes
        await asyncio.sleep(1.0)
        school.buffer.sent(group.samples)
        await school.buffer.fetched()
        return group

    async def scenario():  # of one step: four slots
        return await asyncio.gather(*(slot(*each) for each in enumerate(slots[:4])))

    groups = school.run(scenario())
    assert school.buffer.num_bytes == 0
    kinds = [[s.question.dataset_type for s in group.samples] for group in groups]
    assert kinds == slots[:4]


@pytest.mark.parametrize("error", [WorkerError("out of memory"), None])
def test_a_group_that_one_of_its_teachers_fails_leaves_its_room(error):
    school = School(code=[Teacher(CODE, error)] if error else [Teacher(CODE, seconds=10**6)])

    async def scenario():
        if error:
            with pytest.raises(SlotFailed, match="out of memory"):
                await school.finish(given(0, *MIXED))
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(school.finish(given(0, *MIXED)), 30.0)

    school.run(scenario())
    assert len(school.requests(MATH)) == 1  # which had answered
    assert school.buffer.num_bytes == 0


def test_a_teacher_that_dies_is_asked_again_elsewhere_and_its_room_is_held_once():
    dies = Teacher(MATH, ProcessLostError("its process has ended"), None)
    school = School(math=[dies, Teacher(MATH)])
    group = school.run(school.finish(sampled(0, "sums")))
    assert [len(worker.asked) for worker in school.workers[MATH]] == [1, 1]
    assert school.buffer.num_bytes == held(group)
    assert school.pipeline.take_clock()["reference_retries"] == 2
    assert all(sample.tickets for sample in group.samples)


def test_an_answer_of_the_wrong_shape_is_not_taken():
    class Short(Teacher):
        async def teach(self, request, method="teach"):
            return tuple(scores[:-1] for scores in await super().teach(request, method))

    school = School(math=[Short(MATH)])
    with pytest.raises(SlotFailed):
        school.run(school.finish(sampled(0, "sums")))
    assert school.buffer.num_bytes == 0


def test_lost_payloads_are_asked_of_the_same_teacher_without_further_room():
    school = School()
    group = school.run(school.finish(given(0, *MIXED)))
    num_bytes, kept = school.buffer.num_bytes, without_texts(group.samples)
    lost = kept[1:3]  # one of each teacher; nothing says their type any more
    again = school.run(school.pipeline.scoring.taught_again(lost))
    assert [sample.key for sample in again] == [sample.key for sample in lost]
    assert school.buffer.num_bytes == num_bytes
    for new, old in zip(again, lost, strict=True):
        assert new.tickets[0].teacher == old.tickets[0].teacher
        assert new.tickets[0].num_bytes == old.tickets[0].num_bytes
        assert new.tickets[0].reference[0] is not old.tickets[0].reference[0]
        np.testing.assert_array_equal(new.scores["teacher"], old.scores["teacher"])
