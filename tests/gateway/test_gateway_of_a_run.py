"""The gateway of a run on a real controller, with engines that answer by a script."""

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
from families import tokenizer_of
from gateways import client_of, said
from local_ray import local_ray

from async_grpo.cluster.cluster import Cluster
from async_grpo.config.roles import GENERATION
from async_grpo.gateway.run_gateway import MAX_TURNS_AT_A_TIME
from async_grpo.types import Pulse, Turn, VersionSpan, WeightsAck
from benchmarks.gateway import NUM_OUTPUT, get, served, start_engine

pytestmark = pytest.mark.integration
ASKED = [{"role": "user", "content": "What is 2+3?"}]
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "The sum.", "parameters": {"type": "object"}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
TOKENIZER = tokenizer_of("qwen2_5")


def engine_class():
    class Engine:  # local: Ray then sends its code, instead of a name that it cannot import
        """Says what it was told to say, when it is free."""

        def __init__(self, worker_id, usual):
            self._worker_id, self._usual = worker_id, usual
            self._free = asyncio.Event()
            self._free.set()
            self._answers, self._asked = [], []
            self._num_asking = self._num_ended = 0

        async def ping(self, after_s=0.0):
            await asyncio.sleep(after_s)
            return Pulse("none")

        async def load_weights(self, snapshot):
            self._version = snapshot.version
            return WeightsAck(self._worker_id, snapshot.version, 0.0, 0.0)

        async def abort_all(self):
            pass

        async def generate(self, request):
            self._asked.append(request)
            self._num_asking += 1
            try:
                await self._free.wait()
            except asyncio.CancelledError:
                self._num_ended += 1
                raise
            finally:
                self._num_asking -= 1
            ids = self._answers.pop(0) if self._answers else self._usual
            logprobs = -np.ones(len(ids), np.float32)
            spans = (VersionSpan(self._version, 0, len(ids)),)
            return (Turn(np.array(ids, np.int32), logprobs, spans, "stop", "", self._worker_id),)

        async def hold(self):
            self._free.clear()

        async def release(self):
            self._free.set()

        async def say(self, answers):
            self._answers = answers

        async def take_asked(self):
            asked, self._asked = self._asked, []
            return asked

        async def latest(self):
            return self._asked[-1]

        async def num_asking(self):
            return self._num_asking

        async def num_ended(self):
            """Requests that nobody waited for any more."""
            return self._num_ended

    return Engine


@pytest.fixture(scope="module")
def engines():
    with local_ray(num_cpus=2, namespace="gateway"):
        yield {name: start_engine(engine_class(), name, said("4")) for name in ("one", "two")}


@pytest.fixture(scope="module")
def run(engines, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    TOKENIZER.save_pretrained(folder / "model")
    with served(str(folder / "model"), folder, engines) as run:
        yield run


@pytest.fixture(autouse=True)
def _quiet(run, engines):
    """The run lives, nobody is held, and the session is new."""
    run.controller.heard.remote(run.id)
    yield
    tell(engines, "release")
    wait_until(lambda: not num_asking(engines))
    tell(engines, "take_asked")
    httpx.delete(f"{run.url}/s/mine", headers={"Authorization": f"Bearer {run.token}"})


@pytest.fixture
def client(run):
    return client_of(run.url, session="mine", token=run.token)


def tell(engines, method, *arguments):
    """What each engine answers."""
    return [get(getattr(engine, method).remote(*arguments)) for engine in engines.values()]


def num_asking(engines):
    return sum(tell(engines, "num_asking"))


def chat(client, messages=ASKED, **options):
    return client.chat.completions.create(model="any", messages=messages, **options)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_chat_with_a_tool_is_one_conversation_of_what_an_engine_sampled(run, engines, client):
    tell(engines, "say", [said(CALL), said("It is 5.")])
    (choice,) = chat(client, tools=[ADD], logprobs=True).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason) == ("add", "tool_calls")
    assert [each.logprob for each in choice.logprobs.content] == [-1.0] * len(said(CALL))
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    answer = chat(client, [*ASKED, choice.message, result], tools=[ADD], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == "It is 5."
    first, second = [request for asked in tell(engines, "take_asked") for request in asked]
    history = [*first.input_token_ids, *said(CALL)]
    assert second.input_token_ids[: len(history)].tolist() == history
    assert first.sampling.max_tokens == NUM_OUTPUT  # as in training, where nothing else is asked
    turns = httpx.get(f"{run.url}/s/mine/turns", headers={"Authorization": f"Bearer {run.token}"})
    kept = turns.json()["data"]
    assert [turn["token_ids"] for turn in kept] == [said(CALL), said("It is 5.")]
    assert kept[0]["prompt_token_ids"] == first.input_token_ids.tolist()
    assert kept[0]["weight_versions"][0]["version"] == f"{run.id.incarnation}.0"


def test_several_choices_and_a_stop_string(engines, client):
    tell(engines, "say", [said("one END two"), said("three")])
    choices = chat(client, n=2, stop="END").choices  # one of each engine, or both of one
    contents = [choice.message.content for choice in choices]
    assert "one " in contents
    assert set(contents) <= {"one ", "three"}
    assert [choice.finish_reason for choice in choices] == ["stop", "stop"]


def test_a_session_stays_with_the_engine_that_holds_its_prefix(run, engines, client):
    first, _ = engines.values()
    get(first.hold.remote())
    with ThreadPoolExecutor() as threads:
        held = threads.submit(chat, client_of(run.url, token=run.token))
        wait_until(lambda: get(first.num_asking.remote()) == 1)
        chat(client)  # the other is less loaded
        get(first.release.remote())
        held.result()
    for _ in range(3):
        chat(client)
    assert [len(asked) for asked in tell(engines, "take_asked")] == [1, 4]


def test_many_requests_keep_no_lease_of_training_waiting(run, engines):
    tell(engines, "hold")
    client = client_of(run.url, token=run.token)
    with ThreadPoolExecutor(40) as threads:
        answers = [threads.submit(chat, client) for _ in range(40)]
        wait_until(lambda: num_asking(engines) == MAX_TURNS_AT_A_TIME)
        request = get(next(iter(engines.values())).latest.remote())
        training = [
            run.controller.ask.remote(run.id, GENERATION, "generate", request, cost=4.0)
            for _ in engines  # all that they take
        ]
        wait_until(lambda: num_asking(engines) == MAX_TURNS_AT_A_TIME + len(engines))
        time.sleep(0.5)
        assert num_asking(engines) == MAX_TURNS_AT_A_TIME + len(engines)
        tell(engines, "release")
        assert all(answer.result().choices for answer in answers)
        get(training)


def test_a_client_that_goes_ends_what_it_has_asked_for(engines, client):
    tell(engines, "hold")
    before = sum(tell(engines, "num_ended"))
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.5))
    wait_until(lambda: sum(tell(engines, "num_ended")) == before + 1)


def test_a_gateway_that_dies_comes_back_at_its_address(run, client):
    os.kill(Cluster().process_of(run.gateway), signal.SIGKILL)

    def is_back():
        try:
            return chat(client).choices[0].message.content == "4"
        except openai.APIConnectionError:
            return False

    wait_until(is_back)


def test_a_controller_that_is_lost_is_one_sentence_until_the_run_goes_on(run, client):
    chat(client)
    os.kill(Cluster().process_of(run.controller), signal.SIGKILL)
    with pytest.raises(openai.InternalServerError, match="or goes on at another one: ask again"):
        chat(client)
    run.begin_again()
    assert chat(client).choices[0].message.content == "4"


def test_a_turn_whose_engine_dies_is_sampled_again_elsewhere(engines, client):
    tell(engines, "hold")
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(chat, client)
        wait_until(lambda: num_asking(engines) == 1)
        asked = next(name for name, e in engines.items() if get(e.num_asking.remote()))
        os.kill(Cluster().process_of(engines.pop(asked)), signal.SIGKILL)
        tell(engines, "release")
        assert answer.result().choices[0].message.content == "4"
    assert num_asking(engines) == 0
