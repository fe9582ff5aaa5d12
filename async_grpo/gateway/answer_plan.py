"""Plans the turns that are sampled for a request, and how they are read.

Engines know token ids only, so this file looks for stop strings.
"""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import jsonschema

from async_grpo.environments.chat.messages import Dialogue, Reply
from async_grpo.environments.chat.template import json_tag
from async_grpo.gateway import answers, wire
from async_grpo.gateway.session import Session, TurnRequest
from async_grpo.types import Turn
from async_grpo.util.errors import AsyncGrpoError

MAX_ANSWERS = 256  # to one request: its prompts x n


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The turns that are sampled for one request, and how they are read."""

    form: answers.ChatForm
    turns: Sequence[TurnRequest]  # by the index of their choice
    read: Callable[[Turn], Reply]
    num_prompt: int  # tokens
    logprobs: Callable[[Turn], wire.Json] | None
    # From the ids of a turn that goes on to its content so far; None: only its end shows that.
    so_far: Callable[[Sequence[int]], str] | None

    def choice(self, index: int, turn: Turn) -> answers.AnsweredChoice:
        """The choice number `index`, from its turn."""
        logprobs = self.logprobs(turn) if self.logprobs else None
        return answers.AnsweredChoice(index, turn, self.read(turn), logprobs)


async def chat_plan(session: Session, asked: wire.ChatRequest) -> AnswerPlan:
    """The plan for a chat; raises `Refused`."""
    try:
        session.check_size([asked.messages, asked.offered_tools])
        dialogue = await session.dialogue(asked.offered_tools)
        prompt_ids = await asyncio.to_thread(dialogue.prompt, asked.messages)
    except wire.Refused:
        raise
    except AsyncGrpoError as error:
        raise wire.Refused(str(error)) from error
    stop = StopText(asked.stops, session.decode)

    def read(turn: Turn) -> Reply:
        sampled_ids = turn.token_ids.tolist()
        reply = dialogue.heard(
            asked.messages, prompt_ids=prompt_ids, sampled_ids=sampled_ids, shown=stop.until
        )
        session.mistake = session.mistake or mistake_in(reply, asked)
        return reply

    return AnswerPlan(
        answers.ChatForm(asked.model or session.sampler.name, asked.has_usage),
        _turn_requests(
            session,
            asked,
            prompt_ids,
            asked.longest,
            stop,
            stop_ids=dialogue.stop_token_ids,
            grammar=_grammar(dialogue, asked, is_trained=session.sampler.decides_sampling),
        ),
        read,
        len(prompt_ids),
        partial(answers.chat_logprobs, decode=session.decode) if asked.logprobs else None,
        (lambda ids: _settled(dialogue.text(ids), stop)) if dialogue.is_plain else None,
    )


def _grammar(dialogue: Dialogue, asked: wire.ChatRequest, *, is_trained: bool) -> str:
    """See `SamplingContract`; empty: any turn, which `mistake_in` checks.

    Calls that a trained policy has to make are its own: only an answer in JSON may be forced on it.
    """
    schema = asked.content_schema
    calls = dialogue.calls(asked.callable_tools, is_one=asked.parallel_tool_calls is False)
    if asked.must_call:
        found = None if is_trained else calls
    elif schema is not None and asked.offered_tools:
        found = calls and {"type": "or", "elements": [calls, json_tag(schema)]}
    else:
        found = None if schema is None else json_tag(schema)
    tag = json.dumps({"type": "structural_tag", "format": found})
    return json.dumps({"structural_tag": tag}) if found else ""


def mistake_in(reply: Reply, asked: wire.ChatRequest) -> str:
    """What in a turn does not follow the request, such as a call of no tool; empty: all of it does.

    >>> from async_grpo.environments.chat.messages import ToolCall
    >>> mistake_in(Reply("", (ToolCall("look", {}),)), wire.ChatRequest(messages=[]))
    "calls 'look', which is no tool"
    """
    if not reply.tool_calls:
        return "calls no tool, which it must" if asked.must_call else _unfit(reply.content, asked)
    functions: list[Any] = [tool["function"] for tool in asked.callable_tools]
    offered = {function["name"]: function.get("parameters") for function in functions}
    for call in reply.tool_calls:
        if call.problem or call.name not in offered:
            return call.problem or f"calls {call.name!r}, which is no tool"
        try:
            jsonschema.validate(call.arguments, offered[call.name] or {})
        except jsonschema.ValidationError as error:
            return f"calls {call.name!r} with wrong arguments: {error.message}"
        except Exception:  # the schema comes from the agent and may be invalid
            continue
    return ""


def _unfit(content: str, asked: wire.ChatRequest) -> str:
    """Why the content is not what `response_format` asks for; empty: it is."""
    if asked.content_schema is None:
        return ""
    try:
        jsonschema.validate(json.loads(content), asked.content_schema)
    except (ValueError, RecursionError) as error:
        return f"is no JSON, which response_format asks for: {error}"
    except jsonschema.ValidationError as error:
        return f"does not fit response_format: {error.message}"
    except Exception:  # as above
        return ""
    return ""


async def completion_plan(session: Session, asked: wire.CompletionRequest) -> AnswerPlan:
    """The plan for a completion, which may have several prompts; raises `Refused`."""
    stop = StopText(asked.stops, session.decode)
    given = _prompts(asked.prompt)
    if len(given) * asked.n > MAX_ANSWERS:
        raise wire.Refused(
            f"prompts x n must be at most {MAX_ANSWERS}, got {len(given)} x {asked.n}: send fewer "
            "at a time"
        )
    for prompt in given:
        session.check_size(prompt)
    prompts = await asyncio.to_thread(
        lambda: [session.encode(p) if isinstance(p, str) else p for p in given]
    )
    turns = [_turn_requests(session, asked, ids, asked.max_tokens, stop) for ids in prompts]
    return AnswerPlan(
        answers.CompletionForm(asked.model or session.sampler.name, asked.has_usage),
        list(chain.from_iterable(turns)),
        lambda turn: Reply(stop.until(session.decode(turn.token_ids.tolist()))),
        sum(map(len, prompts)),
        None
        if asked.logprobs is None
        else partial(answers.completion_logprobs, decode=session.decode),
        lambda ids: _settled(session.decode(ids), stop),
    )


def generation(
    session: Session, asked: wire.SamplingRequest, prompt_ids: Sequence[int]
) -> list[TurnRequest]:
    """The turns for a request in token ids; raises `Refused`."""
    stop = StopText(asked.stops, session.decode)
    return _turn_requests(session, asked, prompt_ids, asked.max_tokens, stop)


def _turn_requests(
    session: Session,
    asked: wire.SamplingRequest,
    prompt_ids: Sequence[int],
    max_tokens: int | None,
    stop: StopText,
    *,
    stop_ids: Sequence[int] = (),
    grammar: str = "",
) -> list[TurnRequest]:
    """One for each choice of a prompt; with a seed, the seed counts up. Raises `Refused`."""
    ids = tuple(dict.fromkeys((*stop_ids, *(asked.stop_token_ids or ()))))
    first = TurnRequest(
        prompt_ids, max_tokens, asked.temperature, ids, asked.seed, grammar, stop.cut
    )
    session.check(first)
    seeds = [None if first.seed is None else first.seed + index for index in range(asked.n)]
    return [replace(first, seed=seed) for seed in seeds]


def _prompts(prompt: Any) -> list[str | list[int]]:
    """Each of the prompts, as a text or as ids."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise wire.Refused("prompt must hold at least one prompt, got none: give one")
    return list(prompt)


def _settled(text: str, stop: StopText) -> str:
    """The part of an unfinished text that will stay: no half characters, no start of a stop string.

    >>> _settled("ab END", StopText(("END!",), str))
    'ab '
    """
    text = stop.until(text).rstrip("\ufffd")
    held = max((len(stop) for stop in stop.stops), default=1) - 1
    return text[: len(text) - held] if held else text


@dataclass(frozen=True, slots=True)
class StopText:
    """The strings that end a turn; a token with more than the end of one is kept whole."""

    stops: tuple[str, ...]
    decode: answers.Decode

    def cut(self, turn: Turn) -> Turn:
        """The turn up to the token that completes a stop string; without one the same object."""
        token_ids = turn.token_ids.tolist()
        if not self._is_in(token_ids):
            return turn
        counts = range(len(token_ids))
        num = bisect_left(counts, True, key=lambda count: self._is_in(token_ids[:count]))
        return turn.stopped(num, text=self.until(self.decode(token_ids[:num])))

    def until(self, text: str) -> str:
        """The text before the first stop string, which is all that clients see."""
        ends = [place for stop in self.stops if stop and (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def _is_in(self, token_ids: Sequence[int]) -> bool:
        text = self.decode(token_ids) if self.stops else ""
        return any(stop in text for stop in self.stops if stop)
