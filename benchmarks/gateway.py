"""What the gateway adds to a turn: a chat over HTTP against the same turn asked for directly.

The model answers at once, so that only the gateway's own work is left: the connection, JSON,
rendering, the capture of ids. One request at a time, both ways in turn.

    python -m benchmarks.gateway
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np

from async_grpo.chat.base import ToolSpec
from async_grpo.chat.dialogue import Dialogue
from async_grpo.chat.find import find_tokenizer
from async_grpo.chat.template import TemplateRenderer
from async_grpo.gateway.app import make_app
from async_grpo.gateway.base import Ask
from async_grpo.gateway.server import Server
from async_grpo.gateway.session import Session
from async_grpo.gateway.sessions import Sessions
from async_grpo.types import Turn
from benchmarks import results
from benchmarks.results import Figure, median

NAME = "gateway"
MODEL = str(Path(__file__).parent.parent / "sample-data" / "tiny-countdown")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "use 2 9 8 to make 15"}] * 8
NUM_OUTPUT = 64  # tokens
MAX_ADDED_MS = 10.0
TOKEN = "benchmark"


class Instant:
    """Answers at once, each time other tokens."""

    name, max_model_len, decides_sampling = "instant", 1 << 20, False

    def __init__(self) -> None:
        self.sampled: list[list[int]] = []

    async def sample(self, ask: Ask) -> AsyncIterator[Turn]:
        ids = (np.arange(NUM_OUTPUT, dtype=np.int32) * 7 + len(self.sampled)) % 90 + 10
        self.sampled.append(ids.tolist())
        yield Turn(ids, np.zeros(NUM_OUTPUT, np.float32), (), "length", "")


@contextmanager
def listening(sessions: Sessions) -> Any:
    """The URL of a gateway, in a thread of its own."""
    server = Server(make_app(sessions))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    try:
        yield server.url
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive()


def measure(num_requests: int) -> list[Figure]:
    """Milliseconds of a request, and the share of ids that the session has kept."""
    tokenizer = find_tokenizer(MODEL)
    tokenizer.chat_template = TEMPLATE
    renderer = TemplateRenderer(tokenizer)

    async def make_dialogue(tools: Sequence[ToolSpec]) -> Dialogue:
        return Dialogue(renderer, tools=tools)

    sampler = Instant()

    def make_session() -> Session:
        return Session(sampler, tokenizer=tokenizer, make_dialogue=make_dialogue)

    body = json.dumps({"model": "instant", "messages": MESSAGES}).encode()
    headers = {"Authorization": f"Bearer {TOKEN}"}
    direct: list[float] = []
    over_http: list[float] = []
    is_kept: list[bool] = []
    sessions = Sessions(token=TOKEN, make_session=make_session)
    ask = Ask(renderer.render(MESSAGES))
    with (
        listening(sessions) as url,
        httpx.Client(base_url=url, headers=headers) as client,
        asyncio.Runner() as runner,
    ):
        for _ in range(num_requests):
            began = time.perf_counter()
            runner.run(make_session().turn(ask))
            direct.append(1e3 * (time.perf_counter() - began))
            began = time.perf_counter()
            answer = client.post("/s/a/v1/chat/completions", content=body)
            over_http.append(1e3 * (time.perf_counter() - began))
            answer.raise_for_status()
            (turn,) = client.get("/s/a/turns").json()["data"]
            is_kept.append(turn["token_ids"] == sampler.sampled[-1])
            client.delete("/s/a")
    added = [whole - own for whole, own in zip(over_http, direct, strict=True)]
    return [
        median("direct", direct, "ms"),
        median("over HTTP", over_http, "ms"),
        median("added", added, "ms", goal=MAX_ADDED_MS),
        Figure("turns whose ids were kept", sum(is_kept) / len(is_kept), "fraction",
               better="higher", goal=1.0),
    ]  # fmt: skip


@click.command()
@click.option("--quick", is_flag=True, help="few requests, to show that it runs")
@click.option("--results-dir", default=str(results.FOLDER), help="where the figures go")
def main(quick: bool, results_dir: str) -> None:
    """Measure what the gateway adds to a turn."""
    measure(10)  # imports and connections, once
    figures = measure(20 if quick else 500)
    click.echo("\n" + results.show(figures))
    click.echo(f"wrote {results.write(NAME, figures, folder=Path(results_dir))}, {results.load()}")


if __name__ == "__main__":
    main()
