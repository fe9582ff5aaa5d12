"""Requests that belong together, the token ids of each of their turns, and who may send them.

A session has a name and a token. A `Sampler` samples its turns: a run's policy, or an engine.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from async_grpo.environments.chat.find import find_renderer, find_tokenizer
from async_grpo.environments.chat.messages import Dialogue, Tokenizer, ToolSpec
from async_grpo.gateway.wire import Refused
from async_grpo.types import GenerationRequest, SamplingContract, Turn
from async_grpo.types.samples import joined

MAX_TURNS = 1000
TOO_LONG = "context_length_exceeded"
LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a sampler needs to know for one turn."""

    prompt_ids: Sequence[int]
    max_tokens: int | None = None  # None: as many as fit
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    grammar: str = ""  # see `SamplingContract`
    # From a turn to the turn up to its end; the same object: it has not ended.
    cut: Callable[[Turn], Turn] = lambda turn: turn

    def for_engine(self, *, stop_ids: Sequence[int], longest: int) -> GenerationRequest:
        """The request to an engine; `stop_ids`: the model's, `longest`: if there is no maximum."""
        stop_ids = tuple(dict.fromkeys((*stop_ids, *self.stop_ids)))
        longest = self.max_tokens or longest
        sampling = SamplingContract(self.temperature, stop_ids, longest, grammar=self.grammar)
        return GenerationRequest(0, 0, np.array(self.prompt_ids, np.int32), 1, sampling, self.seed)


class Sampler(Protocol):
    """A model that continues token ids."""

    @property
    def name(self) -> str:
        """The model's name; empty: a request may name any model."""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and its output together."""

    @property
    def decides_sampling(self) -> bool:
        """Whether it ignores the temperature and the other sampling options of a request."""

    def sample(self, request: TurnRequest) -> AsyncIterator[Turn]:
        """The turn, in pieces as they are sampled; closing the iterator ends the sampling."""


@dataclass(frozen=True, slots=True, eq=False)
class SampledTurn:
    """A prompt, and the turn that was sampled after it."""

    prompt_ids: Sequence[int]
    turn: Turn


class Session:
    """One client's requests; what the model wrote in one is never tokenised again in the next."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        tokenizer: Tokenizer,
        make_dialogue: Callable[[Sequence[ToolSpec]], Awaitable[Dialogue]],
        room: int = 0,
        full: Callable[[str], Refused] | None = None,
    ) -> None:
        """`tokenizer` is Hugging Face's. `room`: tokens of the longest prompt, by default the
        sampler's; `full` makes the refusal of a prompt that cannot fit.
        """
        self._max_chars = (room or sampler.max_model_len) * longest_token(tokenizer)
        self._full = full or (lambda why: Refused(why, code=TOO_LONG))
        self.sampler = sampler
        self.turns: list[SampledTurn] = []
        self.mistake = ""  # of the model in its last turn, which may make its reader fail
        self._tokenizer = tokenizer
        self._make_dialogue = make_dialogue
        self._dialogues: dict[str, Dialogue] = {}  # by their tools, in JSON

    async def dialogue(self, tools: Sequence[ToolSpec]) -> Dialogue:
        """The conversations with these tools.

        Raises `UnfitModel` for a model that has no chat format.
        """
        key = json.dumps(tools, sort_keys=True)
        if key not in self._dialogues:
            self._dialogues[key] = await self._make_dialogue(tools)
        return self._dialogues[key]

    def encode(self, text: str) -> list[int]:
        """The ids of a text outside of any chat, after those with which the model's texts begin."""
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, without control tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def check_size(self, values: object) -> None:
        """Raise `Refused` for texts with more characters than a prompt's tokens can have.

        Called before they are tokenised; `values`: JSON values with these texts.
        """
        if (number := num_chars(values)) > self._max_chars:
            raise self._full(
                f"a prompt must have at most {self._max_chars} characters, got {number}: shorten it"
            )

    def check(self, request: TurnRequest) -> None:
        """Raise `Refused` unless the engine can sample this turn."""
        num_prompt, longest = len(request.prompt_ids), self.sampler.max_model_len
        stop_ids = request.stop_ids or [0]
        for what, ids in (("a prompt", request.prompt_ids), ("stop_token_ids", stop_ids)):
            if not ids or not 0 <= min(ids) <= max(ids) < len(self._tokenizer):
                raise Refused(
                    f"{what} must be at least one token, of ids from 0 to "
                    f"{len(self._tokenizer) - 1}, got {str(ids)[:80]}: correct it"
                )
        if num_prompt + (request.max_tokens or 1) > longest:
            raise Refused(
                f"prompt + longest output must fit the model's {longest} tokens, got {num_prompt} "
                f"+ {request.max_tokens or 1}: shorten the messages, or lower max_tokens",
                code=TOO_LONG,
            )
        if len(self.turns) >= MAX_TURNS:
            raise Refused(f"a session must have at most {MAX_TURNS} turns: open another")

    async def turn(self, request: TurnRequest) -> Turn:
        """One turn, whole."""
        *_, whole = [turn async for turn in self.pieces(request)]
        return whole

    async def pieces(self, request: TurnRequest) -> AsyncIterator[Turn]:
        """The turn so far, longer each time; it is kept only if it is read to its end."""
        whole: Turn | None = None
        async with aclosing(self.sampler.sample(request)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                whole = replace(joined([whole, piece]), text="") if whole else piece
                if (cut := request.cut(whole)) is not whole:
                    whole = cut
                    break
                yield whole
        if whole is None or whole.finish_reason == "abort":
            raise Refused("the engine has ended the turn: ask again", status=503)
        self.turns.append(SampledTurn(request.prompt_ids, whole))
        self.mistake = "is cut" if whole.finish_reason == "length" else ""
        yield whole


@functools.cache
def longest_token(tokenizer: Tokenizer) -> int:
    """Characters of its longest token: a text of N tokens has at most N times as many."""
    return max(map(len, tokenizer.get_vocab()))


def num_chars(values: object) -> int:
    """Characters of all texts in JSON values, without the keys of objects.

    >>> num_chars([{"role": "user", "content": [{"text": "abc"}]}, None])
    7
    """
    if isinstance(values, dict | list):
        return sum(map(num_chars, values.values() if isinstance(values, dict) else values))
    return len(values) if isinstance(values, str) else 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one gateway: of a request's body, and of sessions and requests at a time."""

    body_bytes: int = 16 << 20
    sessions: int = 256
    requests: int = 256


class Sessions:
    """Finds the session of a request.

    With a token and `make_session`, a client that has the token opens sessions by naming them;
    sessions that the process itself opens have tokens of their own.
    """

    def __init__(
        self,
        *,
        token: str = "",
        make_session: Callable[[], Session] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self._token = token
        self._make_session = make_session
        self._sessions: dict[str, tuple[Session, str]] = {}  # with their tokens

    def open(self, session: Session, *, token: str = "") -> tuple[str, str]:
        """Its name and its token, which serve until `close`; by default the token is a new one."""
        name, token = secrets.token_urlsafe(12), token or secrets.token_urlsafe(24)
        self._sessions[name] = session, token
        return name, token

    def close(self, name: str) -> None:
        """Forget a session and its turns."""
        self._sessions.pop(name, None)

    def find(
        self, name: str | None, *, token: str, header: str = "", opens: bool = True
    ) -> Session:
        """The session `name`; None: a new one for this request alone. Raises `Refused`.

        `header` may name an open session too: clients that route by it send it. `opens`: a session
        that does not exist is made.
        """
        found = self._sessions.get(name or header)
        expected = found[1] if found else self._token
        if not expected or not secrets.compare_digest(expected.encode(), token.encode()):
            raise Refused(
                "a request must carry the token of its session (Authorization: Bearer TOKEN), got "
                f"{'another' if token else 'none'}: set OPENAI_API_KEY",
                status=401,
                code="invalid_api_key",
            )
        if found:
            return found[0]
        if not opens:
            raise Refused(f"there is no session {str(name)[:80]!r}: it has ended", status=404)
        if name and len(name) > LONGEST_NAME:
            raise Refused(f"a session's name must have at most {LONGEST_NAME} characters, got "
                          f"{len(name)}: shorten it")  # fmt: skip
        assert self._make_session is not None, "who has a token makes sessions"
        session = self._make_session()
        if name:
            if len(self._sessions) >= self.limits.sessions:
                raise Refused(
                    f"at most {self.limits.sessions} sessions are kept: end one with DELETE "
                    "/s/NAME",
                    status=429,
                )
            self._sessions[name] = session, self._token
        return session


def model_sessions(
    model: str,
    renderer: str,
    make_sampler: Callable[[], Sampler],
    *,
    token: str,
    limits: Limits | None = None,
) -> Sessions:
    """Sessions for clients that have `token`, with the tokenizer and a renderer of `model`."""
    tokenizer = find_tokenizer(model)  # takes seconds, so before the first request

    async def make_dialogue(tools: Sequence[ToolSpec]) -> Dialogue:
        return Dialogue(find_renderer(model, renderer), tools=tools)

    def make_session() -> Session:
        return Session(make_sampler(), tokenizer=tokenizer, make_dialogue=make_dialogue)

    return Sessions(token=token, make_session=make_session, limits=limits)
