"""From a request to what is sampled for it, and how its turns are read.

Engines know token ids only, so that stop strings are looked for here.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jsonschema

from async_grpo.environments.chat.messages import Reply, ToolSpec
from async_grpo.gateway import wire
from async_grpo.gateway.sampler import Ask, Refused
from async_grpo.gateway.session import Session
from async_grpo.gateway.wire import ChatRequest, CompletionRequest, Decode, SamplingRequest
from async_grpo.types import Turn
from async_grpo.util.errors import AsyncGrpoError

MAX_ANSWERS = 256  # of one request: its prompts x n


@dataclass(frozen=True, slots=True)
class Wanted:
    """One choice: how it is sampled, and read."""

    ask: Ask
    hear: Callable[[Turn], Reply]


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What one request asks for."""

    heading: wire.Heading
    wanted: tuple[Wanted, ...]  # by the index of their choice
    num_prompt: int  # tokens
    logprobs: Callable[[Turn], dict[str, object]] | None
    # The content of a turn that has not ended; None: it cannot be told yet.
    so_far: Callable[[Sequence[int]], str] | None

    @property
    def is_chat(self) -> bool:
        """Whether its choices are messages."""
        return self.heading.kind == "chat.completion"

    def choice(self, index: int, turn: Turn) -> wire.AnsweredChoice:
        """The answer that this turn is."""
        logprobs = self.logprobs(turn) if self.logprobs else None
        return wire.AnsweredChoice(index, turn, self.wanted[index].hear(turn), logprobs)


async def chat_plan(session: Session, asked: ChatRequest) -> AnswerPlan:
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
    return AnswerPlan(
        wire.Heading("chatcmpl", "chat.completion", asked.model or session.sampler.name),
        tuple(Wanted(each, hear) for each in _repeated(ask, asked.n)),
        len(prompt_ids),
        (lambda turn: wire.chat_logprobs(turn, decode)) if asked.logprobs else None,
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


async def completion_plan(session: Session, asked: CompletionRequest) -> AnswerPlan:
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
    return AnswerPlan(
        wire.Heading("cmpl", "text_completion", asked.model or session.sampler.name),
        tuple(
            Wanted(each, lambda turn: Reply(text(turn.token_ids.tolist())))
            for ask in asks
            for each in _repeated(ask, asked.n)
        ),
        sum(map(len, prompts)),
        (lambda turn: wire.completion_logprobs(turn, decode)) if has_logprobs else None,
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


def _prompts(prompt: Any) -> list[str | list[int]]:
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


@dataclass(frozen=True, slots=True)
class StopText:
    """The strings that end a turn; a token that holds more than the end of one is kept whole."""

    stops: tuple[str, ...]
    decode: Decode

    def cut(self, turn: Turn) -> Turn:
        """The turn up to the first token whose text completes a stop string; itself without one."""
        token_ids = turn.token_ids.tolist()
        if not self._is_in(token_ids):
            return turn
        counts = range(len(token_ids))
        num = bisect_left(counts, True, key=lambda count: self._is_in(token_ids[:count]))
        return turn.stopped(num, text=self.until(self.decode(token_ids[:num])))

    def until(self, text: str) -> str:
        """The text before the first stop string, which clients do not see."""
        ends = [place for stop in self.stops if stop and (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def _is_in(self, token_ids: Sequence[int]) -> bool:
        text = self.decode(token_ids) if self.stops else ""
        return any(stop in text for stop in self.stops if stop)
