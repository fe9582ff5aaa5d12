"""`async-grpo serve` with a real engine, asked by the stock client."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import jsonschema
import openai
import pytest
from transformers import AutoTokenizer

# An engine more, in each suite of `make test`, says little that scripted ones do not.
pytestmark = [pytest.mark.integration, pytest.mark.slow]
MODEL = str(Path(__file__).parents[2] / "sample-data" / "tiny-countdown")
NAME = "tiny"
CHAT_MODEL = str(Path(MODEL).parent / "tiny-chat")
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
MUL = {
    "type": "function",
    "function": {
        "name": "mul",
        "parameters": {"type": "object", "properties": {"a": NUMBER}, "required": ["a"]},
    },
}
FLAG = {
    "type": "object",
    "properties": {"x": {"type": "boolean"}},
    "required": ["x"],
    "additionalProperties": False,
}
PROMPT = "use 2 9 8 to make 15\n"
END_S = 60.0


@contextlib.contextmanager
def serving(model, *, longest):
    """Base URL and token; the server is asked to end, and must."""
    command = [sys.executable, "-m", "async_grpo.cli.main", "serve", model, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--max-model-len", str(longest), "--served-model-name", NAME],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    line = process.stdout.readline()
    found = re.search(r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(\S+)", line)
    try:
        yield found[1], found[2]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 128 + signal.SIGTERM


@pytest.fixture(scope="module")
def served():
    with serving(MODEL, longest=64) as found:
        yield found


@pytest.fixture(scope="module")
def chat():
    with serving(CHAT_MODEL, longest=512) as (url, token):
        client = openai.OpenAI(base_url=url, api_key=token, max_retries=0)
        asked = {"model": NAME, "messages": [{"role": "user", "content": PROMPT}]}
        chats = client.chat.completions
        yield lambda **options: chats.create(**asked, max_tokens=120, seed=1, **options).choices[0]


@pytest.fixture
def complete(served):
    url, token = served
    client = openai.OpenAI(base_url=url, api_key=token, max_retries=0)

    def complete(prompt=PROMPT, **options):
        return client.completions.create(model=NAME, prompt=prompt, **options)

    return complete


def test_a_completion_is_the_engine_s_and_comes_in_pieces(complete):
    whole = complete(temperature=0, max_tokens=24).choices[0]
    chunks = list(complete(temperature=0, max_tokens=24, stream=True))
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == whole.text
    assert sum(map(bool, pieces)) >= 5
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_a_stop_string_ends_it(complete):
    text = complete(temperature=0, max_tokens=24).choices[0].text
    stop = text[2:4]
    cut = complete(temperature=0, max_tokens=24, stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")


def test_seeds_give_the_same_again_and_choices_differ(complete):
    options = {"n": 4, "seed": 3, "max_tokens": 24, "temperature": 1.5}
    first, second = (complete(**options) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) > 1


def test_the_ids_of_a_session_are_those_that_were_sampled(served):
    url, token = served
    headers = {"Authorization": f"Bearer {token}"}
    host = url.removesuffix("/v1")
    prompt = AutoTokenizer.from_pretrained(MODEL)(PROMPT)["input_ids"]
    asked = {"token_ids": prompt, "sampling_params": {"max_tokens": 16}}
    with httpx.Client(headers=headers, timeout=60) as client:
        answers = [client.post(f"{host}/s/a/inference/v1/generate", json=asked) for _ in range(4)]
        turns = client.get(f"{host}/s/a/turns").json()["data"]
    got = [answer.json()["choices"][0] for answer in answers]
    assert [turn["token_ids"] for turn in turns] == [choice["token_ids"] for choice in got]
    assert [turn["logprobs"] for turn in turns] == [choice["logprobs"] for choice in got]
    assert all(len(c["logprobs"]["content"]) == len(c["token_ids"]) for c in got)
    assert all(each["logprob"] <= 0 for c in got for each in c["logprobs"]["content"])


def test_tools_and_json_are_sampled_under_their_grammars(chat):
    called = chat(tools=[MUL], tool_choice="required", parallel_tool_calls=False)
    (call,) = called.message.tool_calls
    assert (call.function.name, called.finish_reason) == ("mul", "tool_calls")
    jsonschema.validate(json.loads(call.function.arguments), MUL["function"]["parameters"])
    form = {"type": "json_schema", "json_schema": {"name": "flag", "schema": FLAG}}
    jsonschema.validate(json.loads(chat(response_format=form).message.content), FLAG)
    wrong = {"type": "json_schema", "json_schema": {"name": "wrong", "schema": {"type": "banana"}}}
    with pytest.raises(openai.BadRequestError, match="a schema must be one that vLLM can make a g"):
        chat(response_format=wrong)


def test_what_the_model_cannot_do_is_refused(served, complete):
    with pytest.raises(openai.BadRequestError, match="must fit the model's 64 tokens"):
        complete(max_tokens=60)
    url, token = served
    client = openai.OpenAI(base_url=url, api_key=token, max_retries=0)
    with pytest.raises(openai.BadRequestError, match="has no chat template"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "a"}])
