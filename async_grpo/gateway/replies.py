"""Answers as OpenAI's clients read them. Pure.

Legend: a choice is one of the `n` answers of a request.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_grpo.environments.chat.messages import Reply
from async_grpo.gateway.stopping import Decode
from async_grpo.types import Turn

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Heading:
    """What all parts of one answer say."""

    prefix: str  # of its id
    kind: str
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def of(self, choices: Sequence[Any], *, is_chunk: bool = False, **more: Any) -> dict[str, Any]:
        kind = f"{self.kind}.chunk" if is_chunk and self.kind == "chat.completion" else self.kind
        heading = {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created}
        return {**heading, "model": self.model, "choices": choices, **more}


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One answer, as far as all requests have it alike."""

    index: int
    turn: Turn
    reply: Reply  # of a completion: its text alone
    logprobs: dict[str, Any] | None = None

    @property
    def finish_reason(self) -> str:
        """Why it ended."""
        is_called = any(not call.problem for call in self.reply.tool_calls)
        return "tool_calls" if is_called else self.turn.finish_reason

    def message(self) -> dict[str, Any]:
        """Of a chat."""
        end = {"finish_reason": self.finish_reason, "logprobs": self.logprobs}
        return {"index": self.index, "message": self.reply.message(), **end}

    def text(self) -> dict[str, Any]:
        """Of a completion."""
        end = {"finish_reason": self.finish_reason, "logprobs": self.logprobs}
        return {"index": self.index, "text": self.reply.content, **end}


def usage(num_prompt: int, choices: Sequence[Choice]) -> dict[str, int]:
    """Tokens, all choices together."""
    num_output = sum(len(choice.turn.token_ids) for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


def event(data: dict[str, Any]) -> str:
    """One server-sent event.

    >>> event({"a": 1})
    'data: {"a": 1}\\n\\n'
    """
    return f"data: {json.dumps(data)}\n\n"


def chat_delta(index: int, text: str) -> dict[str, Any]:
    """A part of a chat's choice."""
    delta = {"role": "assistant", "content": text}
    return {"index": index, "delta": delta, "finish_reason": None, "logprobs": None}


def last_chat_deltas(choice: Choice, *, num_sent: int) -> Iterator[dict[str, Any]]:
    """The rest of a chat's choice, of whose content so many characters were sent."""
    message = choice.reply.message()
    calls = [{"index": i, **call} for i, call in enumerate(message.pop("tool_calls", ()))]
    rest = chat_delta(choice.index, message["content"][num_sent:])
    yield {**rest, "delta": message | rest["delta"], "logprobs": choice.logprobs}
    if calls:
        yield {**rest, "delta": {"tool_calls": calls}}
    yield {**rest, "delta": {}, "finish_reason": choice.finish_reason}


def completion_delta(index: int, text: str) -> dict[str, Any]:
    """A part of a completion."""
    return {"index": index, "text": text, "finish_reason": None, "logprobs": None}


def last_completion_deltas(choice: Choice, *, num_sent: int) -> Iterator[dict[str, Any]]:
    """The rest of a completion, of which so many characters were sent."""
    whole = choice.text()
    yield {**whole, "text": whole["text"][num_sent:]}


def chat_logprobs(turn: Turn, decode: Decode) -> dict[str, Any]:
    """What a chat says of each sampled token."""
    content = []
    for token_id, logprob in zip(turn.token_ids.tolist(), turn.logprobs.tolist(), strict=True):
        text = decode([token_id])
        said = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        content.append({**said, "top_logprobs": []})
    return {"content": content, "refusal": None}


def completion_logprobs(turn: Turn, decode: Decode) -> dict[str, Any]:
    """What a completion says of each sampled token."""
    tokens = [decode([token_id]) for token_id in turn.token_ids.tolist()]
    starts = list(itertools.accumulate(map(len, tokens), initial=0))[:-1]
    said = {"tokens": tokens, "token_logprobs": turn.logprobs.tolist(), "top_logprobs": None}
    return {**said, "text_offset": starts}


def generated(index: int, turn: Turn) -> dict[str, Any]:
    """A choice of /inference/v1/generate, by vLLM's schema."""
    pairs = zip(turn.token_ids.tolist(), turn.logprobs.tolist(), strict=True)
    content = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "top_logprobs": []}
        for token, logprob in pairs
    ]
    return {
        "index": index,
        "token_ids": turn.token_ids.tolist(),
        "finish_reason": turn.finish_reason,
        "logprobs": {"content": content},
        "weight_versions": versions(turn),
    }


def versions(turn: Turn) -> list[dict[str, Any]]:
    """Which weights made which tokens; none where they never change."""
    return [
        {"version": str(span.version), "start": span.start, "end": span.stop}
        for span in turn.weights_versions
    ]
