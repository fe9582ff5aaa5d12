"""The stock `openai` client against the gateway, over HTTP."""

import json

import httpx
import openai
import pytest
from gateways import TOKEN, Scripted, client_of, ids_of, listening, said

from async_grpo.gateway.session import Limits
from async_grpo.util.errors import ConfigError, WorkerError

ASKED = [{"role": "user", "content": "What is 2+3?"}]
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "The sum.", "parameters": {"type": "object"}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def chat(client, messages=ASKED, **options):
    return client.chat.completions.create(model="policy", messages=messages, **options)


def test_a_chat_is_answered():
    sampler = Scripted(said("It is 5."))
    with listening(sampler) as url:
        answer = chat(client_of(url), max_tokens=20, temperature=0.5)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("It is 5.", "stop")
    assert answer.usage.completion_tokens == len(said("It is 5."))
    (ask,) = sampler.asked
    assert (ask.max_tokens, ask.temperature) == (20, 0.5)
    assert answer.usage.prompt_tokens == len(ask.prompt_ids)


def test_a_stream_says_the_same_as_it_comes():
    sampler = Scripted(said("It is 5, häh?"), piece=2)
    with listening(sampler) as url:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(chat(client_of(url), **options))
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == "It is 5, häh?"
    assert "\ufffd" not in "".join(texts)
    assert sum(map(bool, texts)) > 3
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == len(said("It is 5, häh?"))


def test_tools_are_called_and_their_results_extend_what_was_sampled():
    sampler = Scripted(said(CALL), said("5"))
    with listening(sampler) as url:
        client = client_of(url, session="one")
        (choice,) = chat(client, tools=[ADD]).choices
        (call,) = choice.message.tool_calls
        assert (call.function.name, choice.finish_reason) == ("add", "tool_calls")
        result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        chat(client, [*ASKED, choice.message, result], tools=[ADD])
    first, second = sampler.asked
    history = [*first.prompt_ids, *said(CALL)]
    assert list(second.prompt_ids[: len(history)]) == history


def test_streamed_tool_calls_come_whole():
    with listening(Scripted(said(CALL))) as url:
        chunks = list(chat(client_of(url), tools=[ADD], stream=True))
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert [call.function.name for call in calls] == ["add"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


MUL = {"type": "function", "function": {"name": "mul"}}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
IN_JSON = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}


def grammar_of(options, answer):
    """What a chat with these options is sampled under: the format of a structural tag."""
    sampler = Scripted(said(answer))
    with listening(sampler) as url:
        chat(client_of(url), **options)
    (ask,) = sampler.asked
    if not ask.grammar:
        return None
    tag = json.loads(json.loads(ask.grammar)["structural_tag"])
    assert tag["type"] == "structural_tag"
    return tag["format"]


def begins(calls):
    return [tag["begin"].split('"')[3] for tag in calls["tags"]]


def test_a_required_tool_is_sampled_under_the_grammar_of_its_calls():
    options = {"tools": [ADD, MUL], "tool_choice": "required"}
    calls = grammar_of(options, CALL)
    assert begins(calls) == ["add", "mul"]
    assert calls["at_least_one"] and not calls["stop_after_first"]
    assert calls["tags"][0]["content"]["json_schema"] == {"type": "object"}
    calls = grammar_of(options | {"parallel_tool_calls": False}, CALL)
    assert calls["stop_after_first"]
    named = {"type": "function", "function": {"name": "mul"}}
    assert begins(grammar_of(options | {"tool_choice": named}, CALL)) == ["mul"]
    assert grammar_of({"tools": [ADD]}, CALL) is None


def test_an_answer_in_json_is_sampled_under_the_grammar_of_its_schema():
    assert grammar_of({"response_format": IN_JSON}, '{"x": 1}')["json_schema"] == POINT
    of_any = grammar_of({"response_format": {"type": "json_object"}}, "{}")
    assert of_any["json_schema"] == {"type": "object"}
    calls, content = grammar_of({"response_format": IN_JSON, "tools": [ADD]}, CALL)["elements"]
    assert (begins(calls), content["json_schema"]) == (["add"], POINT)
    assert grammar_of({"response_format": {"type": "text"}}, "a") is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_turn_and_is_not_shown(stream):
    sampler = Scripted(said("one two END three four five six seven"), said("yes"))
    with listening(sampler) as url:
        client = client_of(url, session="one")
        answer = chat(client, stop=["END"], stream=stream)
        if stream:
            chunks = list(answer)
            content = "".join(c.choices[0].delta.content or "" for c in chunks)
            assert chunks[-1].choices[0].finish_reason == "stop"
        else:
            content = answer.choices[0].message.content
            assert answer.choices[0].finish_reason == "stop"
        assert content == "one two "
        assert sampler.num_pieces == 4  # of three characters: no more is sampled
        again = [
            *ASKED,
            {"role": "assistant", "content": content},
            {"role": "user", "content": "?"},
        ]
        chat(client, again)
    first, second = sampler.asked
    history = [*first.prompt_ids, *ids_of("one two END")]
    assert list(second.prompt_ids[: len(history)]) == history


def test_several_choices_and_their_log_probabilities():
    with listening(Scripted(said("a"), said("bc"))) as url:
        answer = chat(client_of(url), n=2, logprobs=True)
    assert [choice.message.content for choice in answer.choices] == ["a", "bc"]
    content = answer.choices[1].logprobs.content
    assert [(each.token, each.logprob) for each in content[:2]] == [("b", -1.0), ("c", -2.0)]


def test_completions_of_texts_and_of_ids():
    sampler = Scripted(said("xyz", ends=False), said("1"), said("2"), piece=2)
    with listening(sampler) as url:
        client = client_of(url)
        chunks = list(client.completions.create(model="policy", prompt="ab", stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == "xyz"
        assert chunks[-1].choices[0].finish_reason == "length"
        answer = client.completions.create(model="policy", prompt=[ids_of("a"), [5]], logprobs=0)
    assert [choice.text for choice in answer.choices] == ["1", "2"]
    assert answer.choices[0].logprobs.token_logprobs == [-1.0, -2.0]
    assert [list(ask.prompt_ids) for ask in sampler.asked] == [ids_of("ab"), ids_of("a"), [5]]


def test_every_turn_of_a_session_is_kept_as_it_was_sampled():
    sampler = Scripted(said("one two"), said("three"), piece=4)
    with listening(sampler) as url:
        client = client_of(url, session="mine")
        chat(client)
        list(chat(client, stream=True))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        turns = httpx.get(f"{url}/s/mine/turns", headers=headers).json()["data"]
        assert httpx.delete(f"{url}/s/mine", headers=headers).status_code == 204
        assert httpx.get(f"{url}/s/mine/turns", headers=headers).status_code == 404
    assert [turn["token_ids"] for turn in turns] == [said("one two"), said("three")]
    assert [turn["prompt_token_ids"] for turn in turns] == [a.prompt_ids for a in sampler.asked]
    logprobs = [each["logprob"] for each in turns[0]["logprobs"]["content"]]
    assert logprobs == [-float(n) for n in range(1, 9)]
    spans = [(s["version"], s["start"], s["end"]) for s in turns[0]["weight_versions"]]
    assert spans == [("1.0", 0, 4), ("1.4", 4, 8)]


def test_token_ids_go_in_and_out_as_vllm_has_it():
    with listening(Scripted([7, 8, 9], piece=3)) as url:
        asked = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "logprobs": 1}}
        headers = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx.post(f"{url}/inference/v1/generate", json=asked, headers=headers).json()
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([7, 8, 9], "length")
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == [-1.0, -2.0, -3.0]


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model must be 'policy', got 'gpt-4'"),
        ({"max_tokens": 5000}, openai.BadRequestError, "must fit the model's 4096 tokens, got"),
        ({"top_p": 0.5}, openai.BadRequestError, "top_p must be 1 here, got 0.5"),
        ({"temperature": 9}, openai.BadRequestError, "temperature: Input should be less than"),
        ({"messages": []}, openai.BadRequestError, "at least one message, got none"),
        ({"messages": [{"role": "king"}]}, openai.BadRequestError, "a role of system"),
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice must be left out"),
        (
            {"tools": [ADD], "tool_choice": MUL},
            openai.BadRequestError,
            "with ['add']: add it",
        ),
        ({"response_format": {"type": "xml"}}, openai.BadRequestError, "response_format."),
        (
            {"messages": [{"role": "user", "content": "x" * 5000}]},
            openai.APIStatusError,
            "at most 4000 bytes",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(options, error, sentence):
    with listening(Scripted(), limits=Limits(body_bytes=4000)) as url:
        asked = {"model": "policy", "messages": ASKED} | options
        with pytest.raises(error) as caught:
            client_of(url).chat.completions.create(**asked)
    assert sentence in caught.value.body["message"]


def test_a_request_needs_its_session_s_token():
    with listening(Scripted()) as url:
        for token, session in (("wrong", ""), ("wrong", "mine")):
            with pytest.raises(openai.AuthenticationError, match="token of its session"):
                chat(client_of(url, token=token, session=session))
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert [model.id for model in client_of(url).models.list()] == ["policy"]


def test_sessions_and_requests_beyond_the_limits_are_refused():
    sampler = Scripted(said("1"), None)
    with listening(sampler, limits=Limits(sessions=1, requests=1)) as url:
        chat(client_of(url, session="a"))
        with pytest.raises(openai.RateLimitError, match="at most 1 sessions"):
            chat(client_of(url, session="b"))
        with pytest.raises(openai.APITimeoutError):
            chat(client_of(url).with_options(timeout=0.5))
        assert sampler.was_ended.wait(5)  # a client that goes ends what it has asked for


def test_a_model_that_fails_is_an_error_of_the_server():
    dead = Scripted(WorkerError("the engine died"))
    with listening(dead) as url, pytest.raises(openai.InternalServerError, match="engine died"):
        chat(client_of(url))


def test_what_no_worker_serves_is_an_error_of_the_client():
    pinned = Scripted(ConfigError("worker w-1 serves the temperature 1.0 only, got 0.7"))
    with listening(pinned) as url, pytest.raises(openai.BadRequestError, match=r"only, got 0\.7"):
        chat(client_of(url))
