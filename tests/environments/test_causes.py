"""What follows from a failure: no history after the first token leads to a member sampled alone."""

import asyncio
import socket
import urllib.error
import urllib.request

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from players import make_request, make_turn, play

from async_grpo.config.roles import ENVIRONMENT
from async_grpo.environments import play as module
from async_grpo.environments.base import Environment, EpisodeFailed, FailureClass, ModelError
from async_grpo.environments.causes import (
    Cause,
    Next,
    address_of,
    cause_of,
    decide,
    is_repeatable,
    request_of,
)
from async_grpo.types import Verdict
from async_grpo.util.errors import DeadlineError, ServerAway


@given(st.sampled_from(Cause), st.booleans(), st.integers(1, 9))
def test_after_the_first_token_no_cause_begins_an_episode_again(cause, is_repeatable, num_tries):
    follows = decide(cause, has_sampled=True, is_repeatable=is_repeatable, num_tries=num_tries)
    assert follows is not Next.MEMBER
    if follows is Next.GROUP:  # once, and for nothing that the model did or nobody knows of
        assert num_tries == 1 and cause in (Cause.SERVER, Cause.STATE)
    assert (follows is Next.END) == (cause is Cause.MODEL)


@given(st.sampled_from(Cause), st.booleans())
def test_what_is_tried_again_ends(cause, has_sampled):
    tried = [decide(cause, has_sampled=has_sampled, num_tries=number) for number in range(1, 10)]
    waits = cause is Cause.SERVER and not has_sampled  # for as long as an outage may last
    assert tried[-1] in ((Next.MEMBER,) if waits else (Next.FAIL, Next.END))


def http_error(status):
    return httpx2.HTTPStatusError("x", request=None, response=httpx2.Response(status))


@pytest.mark.parametrize(
    ("error", "became"),
    [
        (ConnectionRefusedError(), "not sent"),
        (socket.gaierror(-2, "no such host"), "not sent"),
        (urllib.error.URLError(ConnectionRefusedError()), "not sent"),
        (httpx2.ConnectError("x"), "not sent"),
        (ServerAway("the judge"), "not sent"),
        (http_error(503), "not sent"),
        (http_error(502), "cut"),
        (httpx2.ReadTimeout("x"), "cut"),
        (ConnectionResetError(), "cut"),
        (TimeoutError("no answer within 60 s"), "cut"),
        (http_error(404), ""),
        (http_error(500), ""),
        (DeadlineError("the controller has waited already"), ""),
        (EpisodeFailed(FailureClass.TOOL, "x", cause=Cause.SERVER), ""),
        (FileNotFoundError(2, "x"), ""),
        (KeyError("x"), ""),
    ],
)
def test_what_became_of_a_request_is_read_from_the_error(error, became):
    assert request_of(error) == became
    assert is_repeatable(error, is_idempotent=False) == (became == "not sent")
    if not isinstance(error, EpisodeFailed):
        assert cause_of(error) is (Cause.SERVER if became else Cause.UNKNOWN)
        assert is_repeatable(error, is_idempotent=True) == bool(became)


class Played:
    """Answers each turn with a token of its own, and is told of outages until they end."""

    def __init__(self, *, limit_s=60.0):
        self.limit_s = limit_s
        self.histories, self.told, self.is_over = [], [], []

    async def __call__(self, role, method, request, **_):
        if role == ENVIRONMENT:
            self.told.append((request.dataset_type, request.why))
            try:
                await asyncio.sleep(self.limit_s)
            finally:
                self.is_over.append(True)
            raise DeadlineError("for too long")
        self.histories.append(request.input_token_ids.tolist())
        return [make_turn([10 + len(self.histories)])]


class Fails(Environment):
    """Each member's second turn, or what comes before its first, may fail by a script."""

    def __init__(self, *errors, at=1):
        self.errors, self.at, self.num_plays = list(errors), at, 0

    def fail(self, at):
        if at == self.at and self.errors and (error := self.errors.pop(0)):
            raise error

    async def play(self, question, policy, services):
        self.num_plays += 1
        self.fail(0)
        first = await policy.sample(question.input_token_ids)
        self.fail(1)
        await policy.sample([*question.input_token_ids, *first.token_ids, 60])
        return policy.episode()

    async def grade(self, question, episodes, services):
        self.fail(2)
        return [Verdict.scored(0.5) for _ in episodes]


OWN = (
    ModelError("m"),
    EpisodeFailed(FailureClass.TOOL, "t"),
    EpisodeFailed(FailureClass.DEADLINE, "d"),
)


@given(
    st.lists(
        st.sampled_from(
            (None, KeyError("k"), ConnectionResetError(), ConnectionRefusedError(), *OWN)
        ),
        min_size=3,
        max_size=3,
    )
)
def test_whatever_fails_after_a_turn_no_episode_of_the_group_is_begun_twice(errors):
    environment = Fails(*errors)
    try:
        played = asyncio.run(play(environment, Played(), make_request(num_samples=3)))
    except EpisodeFailed:
        assert any(error and not isinstance(error, ModelError) for error in errors)
    else:
        assert all(error is None or isinstance(error, ModelError) for error in errors)
        assert not played.again
    assert environment.num_plays == 3


def test_what_the_author_calls_the_models_doing_ends_the_episode_which_is_graded():
    environment = Fails(None, ModelError("a castle cannot fly"))
    played = asyncio.run(play(environment, Played(), make_request(num_samples=3)))
    assert sorted(len(episode.turns) for episode in played.episodes) == [1, 2, 2]
    assert [verdict.reward for verdict in played.verdicts] == [0.5] * 3


def test_an_episode_that_the_model_has_ended_has_a_verdict_where_the_others_have_their_own():
    class Own(Fails):
        async def play(self, *asked):
            episode = await super().play(*asked)
            return module.replace(episode, verdict=Verdict.scored(1.0))

        grade = Environment.grade

    environment = Own(ModelError("no such door"), None)
    played = asyncio.run(play(environment, Played(), make_request(num_samples=2)))
    found = [(verdict.status, verdict.reward, verdict.reason) for verdict in played.verdicts]
    assert sorted(found) == [("scored", 1.0, ""), ("unscorable", 0.0, "no such door")]


def test_before_its_first_turn_an_episode_waits_for_its_server_and_is_begun_again():
    environment = Fails(ConnectionRefusedError(), ConnectionRefusedError(), at=0)
    ask = Played()
    played = asyncio.run(play(environment, ask, make_request(num_samples=1)))
    assert (environment.num_plays, len(ask.told), len(ask.is_over)) == (3, 1, 1)
    assert played.again == {"environment: environment": (2, 0)}


def test_before_its_first_turn_what_nobody_knows_is_tried_so_often():
    environment = Fails(*[KeyError("k")] * 9, at=0)
    with pytest.raises(EpisodeFailed):
        asyncio.run(play(environment, Played(), make_request(num_samples=1)))
    assert environment.num_plays == 3


def test_a_server_that_grades_is_asked_again_and_nothing_is_played_again():
    environment = Fails(ServerAway("the judge"), ConnectionResetError(), at=2)
    ask = Played()
    played = asyncio.run(play(environment, ask, make_request(num_samples=2)))
    assert len(ask.histories) == 4 and environment.num_plays == 2
    assert (len(ask.told), len(played.verdicts)) == (1, 2)


def test_a_server_that_stays_away_fails_the_episodes_when_the_controller_says_so():
    environment = Fails(*[ServerAway("the judge")] * 99, at=2)
    with pytest.raises(EpisodeFailed, match="for too long") as caught:
        asyncio.run(play(environment, Played(limit_s=0.1), make_request(num_samples=1)))
    assert caught.value.cause is Cause.UNKNOWN


@pytest.mark.parametrize("is_idempotent", [False, True])
def test_a_request_of_an_authors_own_is_sent_again_as_it_was(is_idempotent):
    sent = []

    class Mine(Fails):
        async def play(self, question, policy, services):
            async def send():
                sent.append(first.token_ids.tolist())
                if len(sent) < 3:
                    raise ConnectionResetError if is_idempotent else ConnectionRefusedError
                return "found"

            first = await policy.sample(question.input_token_ids)
            assert await services.reach(send, is_idempotent=is_idempotent) == "found"
            return policy.episode()

    ask = Played()
    asyncio.run(play(Mine(), ask, make_request(num_samples=1)))
    assert sent == [[11]] * 3 and len(ask.histories) == len(ask.told) == 1


@pytest.mark.parametrize("with_toolbox", [False, True])
def test_a_server_that_an_environment_asks_itself_is_waited_for_before_its_group_is_played_again(
    with_toolbox,
):
    """Else other groups of its type, which do not ask it, would go on meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = held.getsockname()

    class Mine(Fails):
        async def play(self, question, policy, services):
            await policy.sample(question.input_token_ids)
            try:
                await asyncio.to_thread(socket.create_connection, address, 5)
            except OSError as error:
                if with_toolbox:
                    raise EpisodeFailed(FailureClass.TOOL, "t", cause=Cause.SERVER) from error
                raise

    async def scenario():
        ask, started = Played(), asyncio.get_running_loop().time()
        playing = asyncio.create_task(play(Mine(), ask, make_request(num_samples=1)))
        await asyncio.sleep(0.3)
        assert len(ask.told) == 1 and not ask.is_over and not playing.done()
        async with await asyncio.start_server(lambda *_: None, *address):
            with pytest.raises(EpisodeFailed) as caught:
                await playing
        assert asyncio.get_running_loop().time() - started < 20
        return caught.value, ask

    failed, ask = asyncio.run(scenario())
    assert failed.cause is Cause.SERVER and len(ask.histories) == 1 and ask.is_over


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x", "http://no.such.host.invalid:9/x"])
def test_the_address_of_a_server_that_refuses_is_found(url):
    with pytest.raises(OSError) as by_urllib:
        urllib.request.urlopen(url, timeout=5)
    with pytest.raises(httpx2.ConnectError) as by_httpx2:
        httpx2.get(url, trust_env=False, timeout=5)
    host = url.split("/")[2].partition(":")[0]
    assert address_of(by_urllib.value) == address_of(by_httpx2.value) == (host, 9)
    assert address_of(KeyError("x")) is None
