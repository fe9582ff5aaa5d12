"""Agents served over HTTP, by a real server, played against scripted turns of a real gateway."""

import asyncio

import pytest
from gateways import RENDERER, TOKENIZER, said
from players import Scripted, make_request, make_turn, play
from remote_agents import chat, served

from async_grpo.bridges import agent
from async_grpo.environments.base import EpisodeFailed, FailureClass
from async_grpo.environments.causes import Cause
from async_grpo.environments.find import (
    check_environments,
    grades_itself,
    make_environment,
    users_environment,
)
from async_grpo.types import Question
from async_grpo.util.errors import ConfigError

QUESTION = Question([5], "2+3?", "5", {"answer": "5", "level": 2})


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch):
    monkeypatch.setattr(agent, "find_tokenizer", lambda model: TOKENIZER)


def played(act, *turns, **fields):
    with served(act) as name:
        environment = make_environment(users_environment(name))
        request = {"num_samples": 1, "max_row_tokens": 2000, "question": QUESTION} | fields
        return asyncio.run(play(environment, Scripted(*turns), make_request(**request), RENDERER))


def test_what_the_gateway_recorded_is_trained_with_the_agent_s_reward():
    sent = []

    def act(asked):
        sent.append(asked)
        first = chat(asked)
        return {"reward": len(first), "info": {"answer": first}}

    group = played(act, said("four"), said("four"), num_samples=2)
    assert [(v.status, v.reward) for v in group.verdicts] == [("scored", 4.0)] * 2
    for episode in group.episodes:
        (row,) = episode.rows
        assert row.token_ids[row.loss_mask].tolist() == said("four")
    assert all((each["input"], each["answer"], each["columns"]) == ("2+3?", "5", QUESTION.columns)
               for each in sent)  # fmt: skip
    assert len({each["base_url"] for each in sent}) == 2  # a session each


def test_no_proxy_stands_before_an_agent_on_this_machine(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("NO_PROXY", "elsewhere")

    def act(asked):
        monkeypatch.delenv("HTTP_PROXY")  # the agent's own client
        return {"reward": len(chat(asked))}

    [verdict] = played(act, said("four")).verdicts
    assert (verdict.status, verdict.reward) == ("scored", 4.0)


TRACE = "what trains is what the gateway recorded, no trace of another engine"


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ({"reward": 1.0, "token_ids": [1], "logprobs": [0.0]}, f"got logprobs, token_ids: {TRACE}"),
        ({"reward": 1.0, "messages": []}, f"got messages: {TRACE}"),
        ({}, "must answer with a JSON object that has a reward, got {}"),
        ([1.0], "must answer with a JSON object that has a reward"),
        (b"no JSON", "must answer with a JSON object that has a reward, got no JSON"),
        ({"reward": None}, "must answer with a finite reward, got None"),
        ({"reward": "1"}, "must answer with a finite reward, got '1'"),
        (b'{"reward": NaN}', "must answer with a finite reward, got nan"),
        (b'{"reward": 1e999}', "must answer with a finite reward, got inf"),
        ({"reward": 10**400}, "must answer with a finite reward, got 1000"),
        (
            {"reward": 1, "info": "x" * (1 << 20)},
            "must answer with at most 1048576 bytes, got more",
        ),
        ((500, b"Traceback: no idea"), "answered 500: Traceback: no idea"),
        ((302, b""), "answered 302"),
    ],
)
def test_what_is_no_reward_fails_the_group_after_the_first_token(reply, sentence):
    num_asked = []

    def act(asked):
        num_asked.append(chat(asked))
        return reply

    with pytest.raises(EpisodeFailed) as caught:
        played(act, *[said("a")] * 3)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert (caught.value.failure, caught.value.cause) == (FailureClass.ENVIRONMENT, Cause.UNKNOWN)
    assert num_asked == ["a"]  # never again alone


def test_an_agent_that_asks_nothing_is_told_where_the_policy_is():
    with pytest.raises(
        EpisodeFailed, match=r"without a request to http://127.0.0.1:\d+: let it use "
    ):
        played(lambda asked: {"reward": 1.0})


def test_before_the_first_token_an_agent_is_asked_again_and_after_it_the_group_is_played_again():
    answers = [(500, b""), (500, b"")]

    def fails_twice(asked):
        return answers.pop() if answers else {"reward": len(chat(asked))}

    group = played(fails_twice, said("four"))
    assert group.verdicts[0].reward == 4 and group.again == {"environment: environment": (2, 0)}

    def dies(asked):
        chat(asked)

    with pytest.raises(EpisodeFailed) as caught:
        played(dies, said("a"), said("b"))
    assert caught.value.cause is Cause.SERVER and not caught.value.again


def test_an_agent_that_the_model_s_mistake_has_broken_ends_the_episode():
    cut = make_turn(said("a long story", ends=False), finish_reason="length")
    group = played(lambda asked: (500, chat(asked).encode()), cut)
    (verdict,) = group.verdicts
    assert (verdict.status, verdict.reward) == ("unscorable", 0.0) and "500" in verdict.reason


def test_an_agent_without_room_says_what_its_episode_is_worth():
    def act(asked):
        heard = [chat(asked, "a " * 20 * number) for number in range(9)]
        return {"reward": heard.index("context_length_exceeded")}

    group = played(act, *[said("a")] * 9, max_row_tokens=160)
    (episode,) = group.episodes
    assert episode.is_cut and 1 < len(episode.turns) < 9
    assert group.verdicts[0].reward == len(episode.turns)
    with pytest.raises(EpisodeFailed, match="has no room: the agent's first request does not fit"):
        played(lambda asked: {"reward": len(chat(asked, "a " * 400))}, max_row_tokens=160)


def test_a_lost_engine_is_none_of_the_agent_s():
    lost = EpisodeFailed(FailureClass.ENGINE, "lost")
    with pytest.raises(EpisodeFailed) as caught:
        played(lambda asked: {"reward": len(chat(asked) or "")}, *[lost] * 9)
    assert caught.value.failure == FailureClass.ENGINE


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("https://agents:8000/run", "an agent on agents cannot reach gateways that listen on"),
        ("http://10.1.2.3/run --listen 127.0.0.1", "cannot reach gateways that listen on 127.0.0"),
        ("http://localhost:1/run --listen", "after a URL may stand --listen and an address"),
        ("http://localhost:1/run fast", "after a URL may stand --listen and an address"),
        ("http:///run", "after a URL may stand --listen and an address"),
    ],
)  # fmt: skip
def test_an_agent_that_could_not_reach_the_policy_is_refused_before_the_run(words, sentence):
    with pytest.raises(ConfigError) as caught:
        check_environments([f"agent:{words}"])
    assert sentence in str(caught.value)


def test_an_agent_elsewhere_grades_and_a_gateway_of_every_interface_has_an_address():
    name = "agent:http://127.0.0.1:9/run.py --listen 0.0.0.0"
    assert grades_itself(name) and not grades_itself("agent:python -m mine")
    environment = make_environment(users_environment(name))
    assert environment.server.url.startswith("http://0.0.0.0:")
    assert environment._elsewhere.gateway.startswith("http://127.0.0.1:")
    with pytest.raises(ConfigError, match=r"that this worker can reach, got nowhere\.invalid: "):
        make_environment(users_environment("agent:http://nowhere.invalid/x --listen 0.0.0.0"))
