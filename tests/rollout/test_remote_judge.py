"""A judge at an OpenAI-compatible address: what it is sent, and how its failures are named."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from async_grpo.config.worker_config import WorkerConfig
from async_grpo.rollout import judge
from async_grpo.rollout.judge import RemoteJudge
from async_grpo.types import JudgeRequest
from async_grpo.util.errors import ServerAway, WorkerError

REQUEST = JudgeRequest(({"role": "user", "content": "Is it right?"},), 0.0, 16)
ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "VERDICT: yes"},
        }
    ],
    "usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13},
}


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setenv("A_KEY", "secret")

    class Service(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.heard.append((self.path, self.headers["Authorization"], body))
            status, answer = server.answers.pop(0) if server.answers else (200, ANSWER)
            time.sleep(answer.get("after_s", 0))
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.heard, server.answers = [], []
    server.handle_error = lambda *_: None  # whoever hangs answers nobody
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(service, *, timeout_s=20.0):
    url = f"http://127.0.0.1:{service.server_port}/v1"

    async def scenario():
        config = WorkerConfig(
            mode="judge", name="strict", model_path="some/model", judge_url=url, judge_key="A_KEY"
        )
        return await RemoteJudge(config, key="secret", timeout_s=timeout_s).answer(REQUEST)

    return asyncio.run(scenario())


def test_the_service_gets_messages_and_key_and_its_answer_and_cost_come_back(service):
    answer = ask(service)
    assert (answer.text, answer.num_tokens) == ("VERDICT: yes", 13)
    ((path, key, body),) = service.heard
    assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer secret", "some/model")
    assert body["messages"] == [{"role": "user", "content": "Is it right?"}]
    assert (body["temperature"], body["max_completion_tokens"]) == (0.0, 16)


def test_an_overloaded_service_is_asked_again_and_one_that_refuses_is_an_error(service):
    service.answers = [(503, {})]
    assert ask(service).text == "VERDICT: yes"
    service.answers = [(401, {"error": {"message": "wrong key"}})]
    with pytest.raises(WorkerError, match=r"the judge at http://127.*401.*wrong key") as caught:
        ask(service)
    assert "secret" not in str(caught.value)
    assert len(service.heard) == 3


def test_a_service_that_hangs_ends_with_the_deadline(service):
    service.answers = [(200, {"after_s": 1.0})]
    started = time.monotonic()
    with pytest.raises(ServerAway, match=r"gave no answer within 0.2 s"):
        ask(service, timeout_s=0.2)
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize(
    ("answer", "error"),
    [((503, {}), ServerAway), ((429, {}), ServerAway), ((400, {}), WorkerError)],
)
def test_a_service_that_is_away_is_told_from_one_that_refuses(service, monkeypatch, answer, error):
    monkeypatch.setattr(judge, "TRIES_AGAIN", 0)
    service.answers = [answer]
    with pytest.raises(error) as caught:
        ask(service)
    assert type(caught.value) is error
    service.server_port = 1  # nobody listens there
    with pytest.raises(ServerAway, match="Connection error"):
        ask(service)
