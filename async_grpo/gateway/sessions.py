"""Who may ask: sessions by their names, each behind a token."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from async_grpo.gateway.base import Refused
from async_grpo.gateway.session import Session

LONGEST_NAME = 200


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
