"""Requests that belong together, the token ids of every turn that they got, and who may ask.

A session has a name, and stands behind a token.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from async_grpo.environments.chat.messages import Dialogue, Tokenizer, ToolSpec
from async_grpo.gateway.sampler import Ask, Refused, Sampler
from async_grpo.types import Turn

MakeDialogue = Callable[[Sequence[ToolSpec]], Awaitable[Dialogue]]
MAX_TURNS = 1000
TOO_LONG = "context_length_exceeded"
LONGEST_NAME = 200


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """One turn as it was sampled."""

    prompt_ids: Sequence[int]
    turn: Turn


class Session:
    """One client's requests: what the model has said in one is never tokenised again."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        tokenizer: Tokenizer,
        make_dialogue: MakeDialogue,
        room: int = 0,
        full: Callable[[str], Refused] | None = None,
    ) -> None:
        """`tokenizer` is Hugging Face's. `room`: tokens of the longest prompt, by default the
        sampler's; `full`: how one that cannot fit is refused.
        """
        self._max_chars = (room or sampler.max_model_len) * longest_token(tokenizer)
        self._full = full or (lambda why: Refused(why, code=TOO_LONG))
        self.sampler = sampler
        self.turns: list[Heard] = []
        self.mistake = ""  # of the model, in its last turn: why whoever reads it may fail
        self._tokenizer = tokenizer
        self._make_dialogue = make_dialogue
        self._dialogues: dict[str, Dialogue] = {}  # by their tools

    async def dialogue(self, tools: Sequence[ToolSpec]) -> Dialogue:
        """The conversations with these tools.

        Raises `UnfitModel` for a model that has no chat format.
        """
        key = json.dumps(tools, sort_keys=True)
        if key not in self._dialogues:
            self._dialogues[key] = await self._make_dialogue(tools)
        return self._dialogues[key]

    def encode(self, text: str) -> list[int]:
        """The ids of a text that is no chat, with what the model's texts begin with."""
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, without control tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def check_size(self, said: object) -> None:
        """Raise `Refused` for texts that must have more tokens than fit, before they are read."""
        if (number := num_chars(said)) > self._max_chars:
            raise self._full(
                f"a prompt must have at most {self._max_chars} characters, got {number}: shorten it"
            )

    def check(self, ask: Ask) -> None:
        """Raise `Refused` unless the engine can take it."""
        num_prompt, longest = len(ask.prompt_ids), self.sampler.max_model_len
        for what, ids in (("a prompt", ask.prompt_ids), ("stop_token_ids", ask.stop_ids or [0])):
            if not ids or not 0 <= min(ids) <= max(ids) < len(self._tokenizer):
                raise Refused(
                    f"{what} must be at least one token, of ids from 0 to "
                    f"{len(self._tokenizer) - 1}, got {str(ids)[:80]}: correct it"
                )
        if num_prompt + (ask.max_tokens or 1) > longest:
            raise Refused(
                f"prompt + longest output must fit the model's {longest} tokens, got {num_prompt} "
                f"+ {ask.max_tokens or 1}: shorten the messages, or lower max_tokens",
                code=TOO_LONG,
            )
        if len(self.turns) >= MAX_TURNS:
            raise Refused(f"a session must have at most {MAX_TURNS} turns: open another")

    async def turn(self, ask: Ask) -> Turn:
        """One turn, whole."""
        *_, whole = [turn async for turn in self.pieces(ask)]
        return whole

    async def pieces(self, ask: Ask) -> AsyncIterator[Turn]:
        """The turn as far as it is, longer each time; one that is not read to its end is lost."""
        whole: Turn | None = None
        async with aclosing(self.sampler.sample(ask)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                whole = joined(whole, piece) if whole else piece
                if (cut := ask.cut(whole)) is not whole:
                    whole = cut
                    break
                yield whole
        if whole is None or whole.finish_reason == "abort":
            raise Refused("the engine has ended the turn: ask again", status=503)
        self.turns.append(Heard(ask.prompt_ids, whole))
        self.mistake = "is cut" if whole.finish_reason == "length" else ""
        yield whole


@functools.cache
def longest_token(tokenizer: Tokenizer) -> int:
    """Characters of its longest token: so many times as many as tokens a text has at most."""
    return max(map(len, tokenizer.get_vocab()))


def num_chars(said: object) -> int:
    """Characters of all texts in JSON values.

    >>> num_chars([{"role": "user", "content": [{"text": "abc"}]}, None])
    7
    """
    if isinstance(said, dict | list):
        return sum(map(num_chars, said.values() if isinstance(said, dict) else said))
    return len(said) if isinstance(said, str) else 0


def joined(before: Turn, piece: Turn) -> Turn:
    """One turn of the two."""
    start = len(before.token_ids)
    spans = [
        span._replace(start=start + span.start, stop=start + span.stop)
        for span in piece.weights_versions
    ]
    return replace(
        piece,
        token_ids=np.concatenate([before.token_ids, piece.token_ids]),
        logprobs=np.concatenate([before.logprobs, piece.logprobs]),
        weights_versions=(*before.weights_versions, *spans),
        text="",
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """What one gateway takes at a time."""

    body_bytes: int = 16 << 20
    sessions: int = 256
    requests: int = 256


class Sessions:
    """Finds the session of a request.

    With a token and `make_session`, whoever has the token opens sessions by naming them; sessions
    that the process itself opens have tokens of their own.
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
        """Its name and its token, by default one of its own, until it is closed."""
        name, token = secrets.token_urlsafe(12), token or secrets.token_urlsafe(24)
        self._sessions[name] = session, token
        return name, token

    def close(self, name: str) -> None:
        """Forget a session, and whatever was said in it."""
        self._sessions.pop(name, None)

    def find(
        self, name: str | None, *, token: str, header: str = "", opens: bool = True
    ) -> Session:
        """The session `name`; None: one for this request alone. Raises `Refused`.

        `header` names one too, of those that are open: clients send it that route by it. `opens`:
        one that is not there is made.
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
