from functools import partial

from scripted import make_question
from scripted_run import make_config

from async_grpo.algorithms.base import LocalRules
from async_grpo.algorithms.find import find_algorithm
from async_grpo.batching.records import BatcherPlan
from async_grpo.data.order import QuestionStream, sampling_seed
from async_grpo.types import SamplingContract


def make_plan(seed_of):
    stream = QuestionStream(50, seed=3)
    plan = BatcherPlan(
        config=make_config(samples_per_question=5),
        rules=LocalRules(find_algorithm(make_config(samples_per_question=5))),
        questions=tuple(make_question() for _ in range(50)),
        held_out=(),
        order=stream.index,
        replacement=stream.replacement,
        seed_of=seed_of,
        sampling=SamplingContract(1.0, (1,), 12),
        num_ranks=1,
        incarnation=0,
    )
    return plan, stream


def test_a_plan_draws_the_slots_own_question_then_replacements_each_with_its_seed():
    plan, stream = make_plan(partial(sampling_seed, 3))
    drawn = [plan.draw(8, attempt=attempt) for attempt in range(4)]
    expected = [stream.index(8)] + [stream.replacement(8, attempt=a) for a in (1, 2, 3)]
    assert [question for question, _ in drawn] == [plan.questions[index] for index in expected]
    for attempt, (question, request) in enumerate(drawn):
        assert (request.ordinal, request.attempt, request.num_samples) == (8, attempt, 5)
        assert request.input_token_ids is question.input_token_ids
        assert request.seed == sampling_seed(3, ordinal=8, attempt=attempt)
    assert len({request.seed for _, request in drawn}) == 4


def test_without_seeds_engines_draw_their_own():
    plan, _ = make_plan(None)
    assert plan.draw(8, attempt=1)[1].seed is None
