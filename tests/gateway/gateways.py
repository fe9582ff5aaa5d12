"""A gateway that listens, on a model that answers by a script."""

import asyncio
import contextlib
import threading

import numpy as np
import openai
from families import tokenizer_of

from async_grpo.environments.chat.messages import Dialogue
from async_grpo.environments.chat.template import TemplateRenderer
from async_grpo.gateway.app import Server, make_app
from async_grpo.gateway.session import Session, Sessions
from async_grpo.types import Turn, VersionSpan, WeightsVersion

TOKENIZER = tokenizer_of("qwen2_5")
RENDERER = TemplateRenderer(TOKENIZER)
TOKEN = "let-me-in"


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def said(text, *, ends=True):
    """The ids of a turn of the model."""
    return [*ids_of(text), *([RENDERER.stop_token_ids[0]] if ends else [])]


class Scripted:
    """Says the next answer of its script, a few ids at a time; an error is raised."""

    name = "policy"
    max_model_len = 4096
    decides_sampling = False

    def __init__(self, *answers, piece=3):
        self.answers = list(answers)
        self.asked = []
        self.num_pieces = 0
        self.is_held = asyncio.Event()  # an answer of None waits, and says when it is ended
        self.was_ended = threading.Event()
        self._piece = piece

    async def sample(self, ask):
        self.asked.append(ask)
        answer = self.answers.pop(0)
        if answer is None:
            try:
                await asyncio.sleep(60)
            finally:
                self.was_ended.set()
        if isinstance(answer, Exception):
            raise answer
        for start in range(0, len(answer), self._piece):
            self.num_pieces += 1
            ids = answer[start : start + self._piece]
            is_last = start + self._piece >= len(answer)
            ended = "stop" if answer[-1] in RENDERER.stop_token_ids else "length"
            yield Turn(
                np.array(ids, np.int32),
                -np.arange(start + 1, start + 1 + len(ids), dtype=np.float32),
                (VersionSpan(WeightsVersion(1, start), 0, len(ids)),),
                ended if is_last else "length",
                "",
            )
            await asyncio.sleep(0)


def make_session(sampler):
    async def make_dialogue(tools):
        return Dialogue(RENDERER, tools=tools)

    return Session(sampler, tokenizer=TOKENIZER, make_dialogue=make_dialogue)


@contextlib.contextmanager
def listening(sampler, **limits):
    """The URL of a gateway, in a thread of its own."""
    sessions = Sessions(token=TOKEN, make_session=lambda: make_session(sampler), **limits)
    server = Server(make_app(sessions))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    try:
        yield server.url
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive()


def client_of(url, *, session="", token=TOKEN):
    path = f"/s/{session}" if session else ""
    return openai.OpenAI(base_url=f"{url}{path}/v1", api_key=token, max_retries=0)
