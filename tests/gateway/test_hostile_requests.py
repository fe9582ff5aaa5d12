"""Requests that nobody means well with: each is one sentence, and holds up nobody else."""

import json
import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
from gateways import TOKEN, TOKENIZER, Scripted, ids_of, listening, said

from async_grpo.gateway import app
from async_grpo.gateway.answer_plan import MAX_ANSWERS
from async_grpo.gateway.session import LONGEST_NAME, Limits, longest_token, num_chars

ASKED = [{"role": "user", "content": "What is 2+3?"}]
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
CLIENT = httpx.Client(timeout=30, verify=False)  # one for all: reading certificates takes long
OPEN = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


def ask(url, path="/v1/chat/completions", *, method="POST", **body):
    options = {"json": body} if method == "POST" else {}
    return CLIENT.request(method, url + path, headers=AUTHORIZED, **options)


def refusal(answer, status=400):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def connection(url, sent):
    place = urlsplit(url)
    opened = socket.create_connection((place.hostname, place.port))
    opened.sendall(sent)
    return opened


FIELDS = [
    ({"stop_token_ids": [10**6]}, "stop_token_ids must be at least one token, of ids from 0 to"),
    ({"stop_token_ids": [-1]}, "stop_token_ids must be"),
    ({"stop": ""}, "stop: Value error, must be at most 64 texts, none of them empty"),
    ({"stop": ["a", ""]}, "stop: Value error, must be"),
    ({"stop": ["s"] * 65}, "stop: Value error, must be"),
    ({"temperature": 1e-320}, "must be 0, or at least 1e-09"),
    ({"max_tokens": "5"}, "max_tokens: Input should be a valid integer"),
    ({"max_tokens": True}, "max_tokens: Input should be a valid integer"),
    ({"max_tokens": 2**70}, "must fit the model's 4096 tokens"),
    ({"n": "2"}, "n: Input should be a valid integer"),
    ({"seed": 2**200}, "seed: Input should be less than"),
    ({"stream": "yes"}, "stream: Input should be a valid boolean"),
]


def test_each_bad_field_is_one_sentence_that_names_it():
    with listening(Scripted()) as url:
        for options, sentence in FIELDS:
            message = refusal(ask(url, messages=ASKED, **options))
            assert sentence in message and "\n" not in message, options
        for prompt in ([-1, 5], [5, 10**9], ""):
            message = refusal(ask(url, "/v1/completions", prompt=prompt))
            assert "a prompt must be at least one token, of ids from 0 to" in message


CALLED = {"type": "function_call", "call_id": 5, "name": "f", "arguments": "{}"}
MALFORMED = [
    ("/v1/chat/completions", {"messages": ASKED, "tools": [{}], "tool_choice": "required"}),
    ("/v1/chat/completions", {"messages": ASKED, "tools": [{"function": "f"}]}),
    ("/v1/chat/completions", {"messages": ASKED, "tool_choice": {"type": "function"}}),
    ("/v1/chat/completions", {"messages": ASKED, "response_format": {"type": "json_schema"}}),
    ("/v1/completions", {"prompt": "a", "response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", {"messages": ASKED, "structured_outputs": {"regex": "a"}}),
    ("/v1/responses", {"input": 5}),
    ("/v1/responses", {"input": ["x"]}),
    ("/v1/responses", {"input": [{"type": {}}]}),
    ("/v1/responses", {"input": [{"type": "message", "role": ["user"], "content": "x"}]}),
    ("/v1/responses", {"input": [{"type": "message", "role": "user", "content": 5}]}),
    ("/v1/responses", {"input": [CALLED | {"arguments": "{"}]}),
    ("/v1/responses", {"input": [CALLED | {"arguments": None, "name": None}]}),
    ("/v1/responses", {"input": [{"type": "function_call_output", "output": 5}]}),
    ("/v1/responses", {"input": "x", "tools": [{"type": "function"}]}),
    ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": 5}]}),
    ("/v1/responses", {"input": "x", "tool_choice": {"type": "function", "name": 5}}),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}),
]


def test_requests_without_the_form_of_one_are_refused_and_nothing_is_sampled():
    with listening(Scripted()) as url:
        for path, body in MALFORMED:
            assert "\n" not in refusal(ask(url, path, **body)), body


def test_prompts_times_choices_are_bounded():
    with listening(Scripted(*[ids_of("a")] * 4)) as url:
        message = refusal(ask(url, "/v1/completions", prompt=["a"] * (MAX_ANSWERS // 2 + 1), n=2))
        assert message.startswith(f"prompts x n must be at most {MAX_ANSWERS}, got 129 x 2")
        assert len(ask(url, "/v1/completions", prompt=["a"] * 2, n=2).json()["choices"]) == 4


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch):
    read = []
    monkeypatch.setattr(type(TOKENIZER), "__call__", lambda *text, **options: read.append(text))
    longest = 4096 * longest_token(TOKENIZER)
    with listening(Scripted()) as url:
        text = "a " * longest
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ("/v1/completions", {"prompt": text}),
        ):
            answer = ask(url, path, **body)
            assert f"must have at most {longest} characters, got " in refusal(answer)
            assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert not read


def test_no_text_that_fits_has_more_characters_than_the_bound():
    texts = ["a", " " * 100, "it is 5. " * 40, "<|im_end|>", "häßlich 日本語 🎉" * 9]
    for text in texts:
        assert len(text) <= len(ids_of(text)) * longest_token(TOKENIZER)
    assert num_chars(ASKED) == len("userWhat is 2+3?")


def test_others_are_served_while_a_long_text_is_tokenised(monkeypatch):
    slow, begun = type(TOKENIZER).__call__, []

    def tokenise(tokenizer, text, **options):
        if "long" in text:
            begun.append(text)
            time.sleep(1.0)
        return slow(tokenizer, text, **options)

    with listening(Scripted(said("5"), said("5"))) as url, ExitStack() as stack:
        ask(url, messages=ASKED)  # what is read once has been
        monkeypatch.setattr(type(TOKENIZER), "__call__", tokenise)
        body = json.dumps({"messages": [{"role": "user", "content": "long"}]}).encode()
        head = f"Authorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
        answer = stack.enter_context(connection(url, OPEN + head.encode() + body))
        while not begun:
            time.sleep(0.01)
        started = time.monotonic()
        assert ask(url, "/v1/models", method="GET").status_code == 200
        assert time.monotonic() - started < 0.8
        assert answer.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_body_that_does_not_come_gives_its_place_back(monkeypatch):
    monkeypatch.setattr(app, "GATEWAY_BODY_S", 0.3)
    with listening(Scripted(), limits=Limits(requests=2)) as url, ExitStack() as stack:
        head = OPEN + f"Authorization: Bearer {TOKEN}\r\nContent-Length: 99\r\n\r\n{{".encode()
        held = [stack.enter_context(connection(url, head)) for _ in range(2)]
        assert held[0].recv(1000).startswith(b"HTTP/1.1 408")
        held[1].recv(1000)
        assert ask(url, "/v1/models", method="GET").status_code == 200


def test_a_head_that_does_not_end_is_hung_up_on(monkeypatch):
    monkeypatch.setattr(app, "GATEWAY_HEAD_S", 0.3)
    with listening(Scripted(said("5"))) as url, ExitStack() as stack:
        held = [stack.enter_context(connection(url, sent)) for sent in (b"", OPEN)]
        for each in held:
            each.settimeout(5)
            assert each.recv(10) == b""
        with httpx.Client(
            base_url=url, headers=AUTHORIZED, verify=False
        ) as client:  # of several requests
            for _ in range(3):
                assert client.get("/v1/models").status_code == 200
                time.sleep(0.2)
            body = {"messages": ASKED}
            assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_a_session_that_nobody_has_opened_is_not_there():
    with listening(Scripted(said("5"))) as url:
        for path, method in (("/s/none/turns", "GET"), ("/s/none", "DELETE")):
            message = refusal(ask(url, path, method=method), status=404)
            assert message.startswith("there is no session 'none'")
        path = f"/s/{'a' * (LONGEST_NAME + 1)}/v1/chat/completions"
        assert "must have at most 200 characters" in refusal(ask(url, path, messages=ASKED))
        assert ask(url, "/s/one/v1/chat/completions", messages=ASKED).status_code == 200
        assert len(ask(url, "/s/one/turns", method="GET").json()["data"]) == 1
        assert ask(url, "/s/one", method="DELETE").status_code == 204
        refusal(ask(url, "/s/one/turns", method="GET"), status=404)
