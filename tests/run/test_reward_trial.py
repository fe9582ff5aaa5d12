"""The rewards' first call, on the first line of the data."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cluster import controller_client
from oracle import make_config

from async_grpo.run.reward_trial import try_rewards
from async_grpo.types import Question, Verdict
from async_grpo.util.errors import ConfigError

QUESTION = Question(np.arange(3, dtype=np.int32), "2+2=", "4", {"input": "2+2=", "answer": "4"})


def failed(cause):
    return Verdict("error", 0.0, None, "mine", "mine: KeyError: 'x' [mine.py:3]", 0.0, cause)


def graded(status):
    return Verdict(status, 0.0, None, "other", "", 0.0)


class Pool:
    """The only one of its controller, which it plays too."""

    def __init__(self, *verdicts, groupwise=()):
        self.requests, self.verdicts = [], verdicts
        self.info = SimpleNamespace(
            worker_id="verifier-1",
            rewards=SimpleNamespace(names=("mine", "other"), groupwise=groupwise),
        )
        self.client = controller_client(self)

    def receivers(self, role):
        return ((self.info, self.client.controller),)

    def try_out(self, request):
        self.requests.append(request)
        return self.verdicts


def tried(client, questions, config):
    try_rewards(client, questions, data=config.data, evaluation=config.evaluation, timeout_s=60.0)


def test_the_expected_answer_is_what_rewards_are_tried_on():
    pool = Pool(graded("scored"), graded("unscorable"))
    tried(pool.client, [QUESTION], make_config())
    (request,) = pool.requests
    (output,) = request.outputs
    assert (output.question, output.completion.text) == (QUESTION, "4")
    assert output.completion.token_ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        ("exception", "correct the reward, the data, or --column-mapping"),
        ("end", "correct the reward, the data, or --column-mapping"),
        ("overrun", "raise the limit, or have the reward do less"),
    ],
)
def test_a_reward_that_fails_on_it_refuses_the_run(cause, remedy):
    told = (
        r"^reward mine: KeyError: 'x' \[mine.py:3\]: it must grade the first line of data, which "
        rf"has input, answer: {remedy}$"
    )
    with pytest.raises(ConfigError, match=told):
        tried(
            Pool(graded("scored"), failed(cause)).client, [QUESTION], make_config(data_path="data")
        )


@pytest.mark.parametrize("cause", ["connection", "lost"])
def test_what_is_not_the_rewards_own_fault_is_only_told(cause, caplog):
    tried(Pool(failed(cause)).client, [QUESTION], make_config())
    assert "the run starts all the same" in caplog.text


def test_each_type_is_tried_with_its_own_rewards_on_its_first_line():
    config = make_config(data_path="", data="sums=s.jsonl,rewards=mine;odes=o.jsonl,rewards=other")
    pool = Pool(graded("scored"))
    questions = [replace(QUESTION, dataset_type=kind) for kind in ("sums", "odes")]
    tried(pool.client, questions, config)
    asked = [(r.outputs[0].question.dataset_type, r.rewards) for r in pool.requests]
    assert asked == [("sums", ("mine",)), ("odes", ("other",))]
    told = "it must grade the first line of o.jsonl"
    with pytest.raises(ConfigError, match=told):
        tried(Pool(failed("exception")).client, questions[1:], config)


@pytest.mark.parametrize(
    ("groupwise", "asked_of_odes"),
    [((), ()), (("mine",), ("other",)), (("other",), ("mine", "other"))],
)
def test_a_type_that_names_no_rewards_is_not_tried_with_a_groupwise_one_of_another(
    groupwise, asked_of_odes
):
    """Where no type names it, it stays in, and is refused: its questions would be graded twice."""
    config = make_config(data_path="", data="sums=s.jsonl,rewards=mine;odes=o.jsonl")
    pool = Pool(graded("scored"), groupwise=groupwise)
    tried(pool.client, [replace(QUESTION, dataset_type=kind) for kind in ("sums", "odes")], config)
    assert [request.rewards for request in pool.requests] == [("mine",), asked_of_odes]


def test_a_reward_that_no_verifier_has_refuses_the_run():
    config = make_config(data_path="", data="sums=s.jsonl,rewards=mine+third")
    told = (
        "--data of sums must name rewards that verifiers have, got 'third': add it to "
        "--reward-fns of their dispatcher, which has mine, other"
    )
    with pytest.raises(ConfigError, match=told):
        tried(Pool(graded("scored")).client, [replace(QUESTION, dataset_type="sums")], config)
