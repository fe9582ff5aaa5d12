"""From a request to what is sampled for it, and how its turns are read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jsonschema

from async_grpo.environments.chat.messages import Reply, ToolSpec
from async_grpo.gateway import replies
from async_grpo.gateway.base import Ask, Refused
from async_grpo.gateway.session import Session
from async_grpo.gateway.stopping import StopText
from async_grpo.gateway.wire import ChatRequest, CompletionRequest, SamplingRequest
from async_grpo.types import Turn
from async_grpo.util.errors import AsyncGrpoError

MAX_ANSWERS = 256  # of one request: its prompts x n


@dataclass(frozen=True, slots=True)
class Wanted:
    """One choice: how it is sampled, and read."""

    ask: Ask
    hear: Callable[[Turn], Reply]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one request asks for."""

    heading: replies.Heading
    wanted: tuple[Wanted, ...]  # by the index of their choice
    num_prompt: int  # tokens
    logprobs: Callable[[Turn], dict[str, Any]] | None
    # The content of a turn that has not ended; None: it cannot be told yet.
    so_far: Callable[[Sequence[int]], str] | None

    @property
    def is_chat(self) -> bool:
        """Whether its choices are messages."""
        return self.heading.kind == "chat.completion"

    def choice(self, index: int, turn: Turn) -> replies.Choice:
        """The answer that this turn is."""
        logprobs = self.logprobs(turn) if self.logprobs else None
        return replies.Choice(index, turn, self.wanted[index].hear(turn), logprobs)


async def chat_plan(session: Session, asked: ChatRequest) -> Plan:
    """Of a chat; raises `Refused`."""
    try:
        session.check_size([asked.messages, asked.offered_tools])
        dialogue = await session.dialogue(asked.offered_tools)
        prompt_ids = await asyncio.to_thread(dialogue.prompt, asked.messages)
    except Refused:
        raise
    except AsyncGrpoError as error:
        raise Refused(str(error)) from error
    stop = StopText(asked.stops, session.decode)

    def hear(turn: Turn) -> Reply:
        sampled_ids = turn.token_ids.tolist()
        reply = dialogue.heard(
            asked.messages, prompt_ids=prompt_ids, sampled_ids=sampled_ids, shown=stop.until
        )
        session.mistake = session.mistake or mistake_in(reply, asked.offered_tools)
        return reply

    ask = _ask(asked, prompt_ids, stop, max_tokens=asked.longest, stop_ids=dialogue.stop_token_ids)
    session.check(ask)
    decode = session.decode
    return Plan(
        replies.Heading("chatcmpl", "chat.completion", asked.model or session.sampler.name),
        tuple(Wanted(each, hear) for each in _repeated(ask, asked.n)),
        len(prompt_ids),
        (lambda turn: replies.chat_logprobs(turn, decode)) if asked.logprobs else None,
        (lambda ids: _settled(dialogue.text(ids), stop)) if dialogue.is_plain else None,
    )


def mistake_in(reply: Reply, tools: Sequence[ToolSpec]) -> str:
    """What is wrong with the calls of a turn, by what their tools declare; empty: nothing.

    >>> from async_grpo.environments.chat.messages import ToolCall
    >>> mistake_in(Reply("", (ToolCall("look", {}),)), [])
    "calls 'look', which is no tool"
    """
    offered = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    for call in reply.tool_calls:
        if call.problem or call.name not in offered:
            return call.problem or f"calls {call.name!r}, which is no tool"
        try:
            jsonschema.validate(call.arguments, offered[call.name] or {})
        except jsonschema.ValidationError as error:
            return f"calls {call.name!r} with wrong arguments: {error.message}"
        except Exception:  # the schema is the agent's, which may be anything
            continue
    return ""


async def completion_plan(session: Session, asked: CompletionRequest) -> Plan:
    """Of a completion, which may have several prompts; raises `Refused`."""
    stop = StopText(asked.stops, session.decode)
    given = _prompts(asked.prompt)
    if len(given) * asked.n > MAX_ANSWERS:
        raise Refused(
            f"prompts x n must be at most {MAX_ANSWERS}, got {len(given)} x {asked.n}: send fewer "
            "at a time"
        )
    for prompt in given:
        session.check_size(prompt)
    prompts = await asyncio.to_thread(
        lambda: [session.encode(p) if isinstance(p, str) else p for p in given]
    )
    asks = [_ask(asked, prompt, stop, max_tokens=asked.max_tokens) for prompt in prompts]
    for ask in asks:
        session.check(ask)

    def text(token_ids: Sequence[int]) -> str:
        return stop.until(session.decode(token_ids))

    decode, has_logprobs = session.decode, asked.logprobs is not None
    return Plan(
        replies.Heading("cmpl", "text_completion", asked.model or session.sampler.name),
        tuple(
            Wanted(each, lambda turn: Reply(text(turn.token_ids.tolist())))
            for ask in asks
            for each in _repeated(ask, asked.n)
        ),
        sum(map(len, prompts)),
        (lambda turn: replies.completion_logprobs(turn, decode)) if has_logprobs else None,
        lambda ids: _settled(session.decode(ids), stop),
    )


def generation(session: Session, asked: SamplingRequest, prompt_ids: Sequence[int]) -> list[Ask]:
    """Of token ids; raises `Refused`."""
    stop = StopText(asked.stops, session.decode)
    ask = _ask(asked, prompt_ids, stop, max_tokens=asked.max_tokens)
    session.check(ask)
    return _repeated(ask, asked.n)


def _ask(
    asked: SamplingRequest,
    prompt_ids: Sequence[int],
    stop: StopText,
    *,
    max_tokens: int | None,
    stop_ids: Sequence[int] = (),
) -> Ask:
    ids = tuple(dict.fromkeys((*stop_ids, *(asked.stop_token_ids or ()))))
    return Ask(prompt_ids, max_tokens, asked.temperature, ids, asked.seed, stop.cut)


def _repeated(ask: Ask, num: int) -> list[Ask]:
    """One a choice: of a seeded one each has a seed of its own."""
    seeds = [None if ask.seed is None else ask.seed + index for index in range(num)]
    return [replace(ask, seed=seed) for seed in seeds]


def _prompts(prompt: Any) -> list[Any]:
    """Each of them a text, or ids."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise Refused("prompt must hold at least one prompt, got none: give one")
    return list(prompt)


def _settled(text: str, stop: StopText) -> str:
    """Of a text that goes on, what stays: no half characters, no beginning of a stop string.

    >>> _settled("ab END", StopText(("END!",), str))
    'ab '
    """
    text = stop.until(text).rstrip("\ufffd")
    held = max((len(stop) for stop in stop.stops), default=1) - 1
    return text[: len(text) - held] if held else text
