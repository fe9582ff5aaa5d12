"""A reward that grades all outputs of a question in one call, which fails for all of them."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verifier_processes import sandbox

from async_grpo.util.errors import ConfigError
from async_grpo.verification.config import VerifierConfig
from async_grpo.verification.graders import UnscorableError
from async_grpo.verification.graders.shipped import majority_rewards
from async_grpo.verification.verifier import run_adapter

CONFIG = VerifierConfig(reward_names=("mine",))


def ranked(samples, **kwargs):
    """The longer, the better; an empty one holds no answer."""
    order = sorted(samples, key=lambda sample: len(sample["output"]))
    return [
        order.index(sample) / len(samples) if sample["output"] else UnscorableError("empty")
        for sample in samples
    ]


def outcomes_of(adapter, *outputs):
    samples = [{"output": output} for output in outputs]
    adapter.groupwise = True
    return run_adapter("mine", adapter, samples, CONFIG, left_out={})


def test_each_output_has_its_own_result_of_the_one_call():
    outcomes = outcomes_of(ranked, "abc", "", "a")
    assert [(o.status, o.reward) for o in outcomes] == [
        ("scored", 2 / 3),
        ("unscorable", 0.0),
        ("scored", 1 / 3),
    ]
    assert outcomes[1].reason == "empty"


@pytest.mark.parametrize(
    ("adapter", "status", "reason"),
    [
        (lambda samples: [1.0], "error", "must return 3 results, a sample each, it returned 1"),
        (lambda samples: 1.0, "error", "TypeError"),
        (lambda samples: [1.0, "much", 0.0], "error", "must be a finite number, got 'much'"),
        (lambda samples: [1.0, samples[0]["answer"], 0.0], "error", "KeyError: 'answer'"),
        (lambda samples: bytearray(1 << 62), "overrun", "--verifier-memory-mib"),
    ],
)
def test_a_call_that_fails_fails_for_all_outputs(adapter, status, reason):
    outcomes = outcomes_of(adapter, "a", "b", "c")
    assert [outcome.status for outcome in outcomes] == [status] * 3
    assert all(reason in outcome.reason for outcome in outcomes)


@given(st.lists(st.sampled_from(["4", "5", "6", "none"]), min_size=1, max_size=9))
def test_the_single_most_frequent_answer_is_right_and_no_other(said):
    rewards = majority_rewards([f"so it is {each}" for each in said])
    answers = [each for each in said if each != "none"]
    counts = {answer: answers.count(answer) for answer in answers}
    top = [answer for answer in counts if counts[answer] == max(counts.values())]
    for answer, reward in zip(said, rewards, strict=True):
        if answer == "none":
            assert isinstance(reward, UnscorableError)
        else:
            assert reward == float(top == [answer])


ADAPTER = """
import os, time

def vote(samples, **kwargs):
    kinds = [sample["kind"] for sample in samples]
    if "hang" in kinds:
        while True: pass
    if "crash" in kinds:
        os._exit(3)
    if "once" in kinds and not os.path.exists(samples[0]["flag"]):
        os._exit(3)
    return [len(samples) + float(kind == "good") for kind in kinds]

vote.groupwise = True

def other(sample, **kwargs):
    return 0.25
"""


@pytest.fixture
def adapters(tmp_path):
    path = tmp_path / "votes.py"
    path.write_text(ADAPTER)
    return [f"{path}:vote", f"{path}:other"]


def grade(names, *groups, asked=()):
    async def all_of_them():
        async with sandbox(*names, timeout_s=0.5) as box:
            return await asyncio.gather(*(box.grade(group, asked) for group in groups)), box.events

    return asyncio.run(all_of_them())


def group(*kinds):
    return [{"kind": kind, "flag": "/nothing/there"} for kind in kinds]


@pytest.mark.integration
def test_a_whole_group_is_graded_in_one_process_however_large(adapters):
    (small, large), _ = grade(adapters[:1], group("good", "bad"), group(*["bad"] * 200))
    assert [verdict.reward for verdict in small] == [3.0, 2.0]
    assert [verdict.reward for verdict in large] == [200.0] * 200


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "reason"), [("hang", "--verifier-timeout-s"), ("crash", "exit code 3")]
)
def test_a_group_that_cannot_be_graded_is_an_error_as_a_whole_and_no_other_is(
    adapters, kind, reason
):
    (failed, fine), events = grade(adapters[:1], group("good", kind, "bad"), group("good"))
    assert [verdict.status for verdict in failed] == ["error"] * 3
    assert all(reason in verdict.reason for verdict in failed)
    assert [verdict.reward for verdict in fine] == [2.0]
    assert events["retried"] == 1


@pytest.mark.integration
def test_a_question_is_graded_by_the_rewards_that_it_names_alone(adapters):
    (verdicts,), _ = grade(adapters, group("good", "bad"), asked=adapters[1:])
    assert [(verdict.adapter, verdict.reward) for verdict in verdicts] == [(adapters[1], 0.25)] * 2


@pytest.mark.integration
def test_a_groupwise_reward_beside_others_is_refused_before_a_run(adapters):
    async def tried(asked):
        async with sandbox(*adapters, timeout_s=0.5) as box:
            return await box.grade_with_each(group("good")[0], asked)

    (verdict,) = asyncio.run(tried(adapters[:1]))
    assert verdict.reward == 2.0
    with pytest.raises(ConfigError, match="a groupwise reward must grade its questions alone"):
        asyncio.run(tried(()))


@pytest.mark.integration
def test_questions_that_name_no_rewards_are_graded_by_those_that_grade_beside_others(adapters):
    (verdicts,), _ = grade(adapters, group("good", "bad"))
    assert [(verdict.adapter, verdict.reward) for verdict in verdicts] == [(adapters[1], 0.25)] * 2


@pytest.mark.integration
def test_the_shipped_majority_is_graded_without_network_like_the_others():
    async def graded():
        async with sandbox("majority", "countdown") as box:
            samples = [{"output": rf"\boxed{{{n}}}", "input": ""} for n in (4, 4, 5)]
            return await box.grade(samples, ("majority",))

    assert [verdict.reward for verdict in asyncio.run(graded())] == [1.0, 1.0, 0.0]
