"""Many calls of one actor as few: those of one moment travel together, and so do their answers.

A call of a Ray actor costs both processes a fraction of a millisecond, whatever it asks. Whoever
asks an actor for many small things bundles them:

    acquire ─┐                                                  ┌─▶ acquire
    acquire ─┼─▶ Bundles ──take_calls(client, calls)──▶ CallTaker ─▶ acquire
    release ─┘     └───────◀──answers, as they come──◀────┘     └─▶ release

While any call has no answer, one `take_calls` stands open on the actor, to bring it. Nothing else
changes: every call has its own deadline, its own error and its own place in time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from functools import partial
from typing import Any, NamedTuple

from async_grpo.errors import AsyncGrpoError, ProcessLostError, WorkerError

logger = logging.getLogger(__name__)


class Call(NamedTuple):
    """One call of a method of the actor."""

    number: int  # the client's
    method: str
    arguments: tuple[Any, ...]


class Answer(NamedTuple):
    """What became of a call."""

    number: int
    value: Any
    error: Exception | None = None


class Bundles:
    """The client's end; for one event loop."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._client = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._unsent: list[tuple[Call, asyncio.Future[Any]]] = []
        self._life = _Life()

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """The answer, in time; or what the actor raised, or Ray when the actor is lost."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        if not self._unsent:
            loop.call_soon(self._send)  # with whatever else is asked in this turn of the loop
        self._unsent.append((Call(next(self._numbers), method, arguments), answer))
        return answer

    def _send(self) -> None:
        life = self._life
        life.unanswered |= {call.number: answer for call, answer in self._unsent}
        calls, self._unsent = tuple(call for call, _ in self._unsent), []
        exchange = asyncio.get_running_loop().create_task(
            self._exchange(calls, life), name="bundle"
        )
        life.open.add(exchange)
        exchange.add_done_callback(partial(self._closed, life))

    async def _exchange(self, calls: tuple[Call, ...], life: _Life) -> None:
        try:
            life.session, answers = await self._handle.take_calls.remote(
                self._client, life.session, calls
            )
        except Exception as error:  # Ray's, or of the session: all that was asked in it is lost
            if self._life is life:
                self._life = _Life()
            life.end(error)
            return
        life.hear(answers)

    def _closed(self, life: _Life, exchange: asyncio.Task[None]) -> None:
        life.open.discard(exchange)
        if life.is_waiting and not life.open and not self._unsent and not exchange.cancelled():
            self._send()


class _Life:
    """What one process of the actor has been asked."""

    def __init__(self) -> None:
        self.session = ""  # the process' own name, once it has answered
        self.unanswered: dict[int, asyncio.Future[Any]] = {}
        self.open: set[asyncio.Task[None]] = set()  # each has one `take_calls` under way

    @property
    def is_waiting(self) -> bool:
        """Whether anybody still wants an answer."""
        return any(not answer.done() for answer in self.unanswered.values())

    def hear(self, answers: tuple[Answer, ...]) -> None:
        for number, value, error in answers:
            asked = self.unanswered.pop(number, None)
            if asked is None or asked.done():  # nobody waits for it any more
                continue
            if error is None:
                asked.set_result(value)
            else:
                asked.set_exception(error)

    def end(self, error: Exception) -> None:
        for asked in self.unanswered.values():
            if not asked.done():
                asked.set_exception(error)
        self.unanswered.clear()


class CallTaker:
    """The actor's end: runs the calls of its clients side by side."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._session = uuid.uuid4().hex
        self._clients: dict[str, _Client] = {}

    async def take(
        self, client_id: str, session: str, calls: tuple[Call, ...]
    ) -> tuple[str, tuple[Answer, ...]]:
        """Our session, and answers to these calls or to earlier ones of the same client.

        No answers, when another `take` of the client stands open already to bring them. Raises
        `ProcessLostError` for a client that speaks to an earlier process: its calls are lost.
        """
        if session not in ("", self._session):
            raise ProcessLostError("the process that took the calls has ended, and another is here")
        client = self._clients.setdefault(client_id, _Client())
        if not calls and not client.owes:
            raise ProcessLostError("answers are waited for to calls that nobody here knows")
        for call in calls:
            client.begin(self._answer(call))
        answers = await client.answers()
        if not client.owes:
            self._clients.pop(client_id, None)
        return self._session, answers

    async def _answer(self, call: Call) -> Answer:
        try:
            value = await getattr(self._actor, call.method)(*call.arguments)
        except AsyncGrpoError as error:
            return Answer(call.number, None, error)
        except Exception as error:  # the process boundary: classified here, once
            logger.exception("%s failed", call.method)
            reason = f"{call.method} failed: {type(error).__name__}: {error}"
            return Answer(call.number, None, WorkerError(reason))
        return Answer(call.number, value)


class TakesCalls:
    """An actor whose calls may be bundled."""

    _taker: CallTaker | None = None

    async def take_calls(
        self, client: str, session: str, calls: tuple[Call, ...]
    ) -> tuple[str, tuple[Answer, ...]]:
        """Many calls as one: see `CallTaker.take`."""
        self._taker = self._taker or CallTaker(self)
        return await self._taker.take(client, session, calls)


class _Client:
    """What one client has asked for and has not been told yet."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Answer]] = set()
        self._ready: list[Answer] = []
        self._standing: asyncio.Future[None] | None = None
        self._num_arriving = 0  # takes whose calls may be answered in this moment

    @property
    def owes(self) -> bool:
        """Whether there will be something to tell."""
        return bool(self._running or self._ready)

    def begin(self, call: Any) -> None:
        task = asyncio.get_running_loop().create_task(call, name="bundled-call")
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Answer]) -> None:
        self._running.discard(task)
        if task.cancelled():  # the actor ends
            return
        self._ready.append(task.result())
        # Whoever has just asked takes it along, and the call that stands open goes on standing.
        if not self._num_arriving and self._standing is not None and not self._standing.done():
            self._standing.set_result(None)

    async def answers(self) -> tuple[Answer, ...]:
        """Those that are ready; when there are none, the first, unless somebody waits for them."""
        self._num_arriving += 1
        try:
            await asyncio.sleep(0)  # calls that need not wait are answered in this turn of the
            await asyncio.sleep(0)  # loop, and heard of in the next one
        finally:
            self._num_arriving -= 1
        if not self._ready and self._running and self._standing is None:
            self._standing = asyncio.get_running_loop().create_future()
            try:
                await self._standing
            finally:
                self._standing = None
        ready, self._ready = tuple(self._ready), []
        return ready
