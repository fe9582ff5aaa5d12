"""Requests to one actor that share calls of Ray, each of which costs either side 0.5 ms of CPU.

A caller has at most two calls under way. One waits at the actor until any request of the caller is
answered; requests that come meanwhile go with the other, at which the first returns. What is asked
and answered while both are on their way travels together: a lone request goes at once, and the more
there are, the more share a call.

consumes      requests: a method of the actor and its arguments
produces      their answers, each once; a request that is given up is cancelled at the actor
waits for     the actor, as long as a request is not given up: deadlines are the callers'
unblocked by  an answer to any request; the actor's death, which fails all that was sent
"""

from __future__ import annotations

import asyncio
import itertools
import traceback
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from async_grpo.util.errors import AsyncGrpoError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

NUM_UNDER_WAY = 2  # calls
# Its number, the method and its arguments; without a method, the request is given up.
Request = tuple[int, str, Sequence[object], Mapping[str, object]]
Answer = tuple[int, object, Exception | None]  # the request's number, its result or its error


@dataclass(slots=True, eq=False)
class _Caller:
    """What an actor knows of one caller: its open requests, and the answers not taken yet."""

    answering: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    given_up: set[int] = field(default_factory=set)  # answered, or overtaken on their way
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, actor: object, request: Request) -> None:
        """Keep what the method returns, or the error that Ray would make of what it raises."""
        number, method, arguments, named = request
        result, error = None, None
        try:
            result = await getattr(actor, method)(*arguments, **named)
        except (Exception, asyncio.CancelledError) as raised:
            from ray.exceptions import RayTaskError

            # The caller may not know the classes of other errors.
            is_known = isinstance(raised, AsyncGrpoError) or type(raised).__module__ == "builtins"
            cause = raised if is_known else None
            error = RayTaskError("exchange", traceback.format_exc(), cause)
        if self.answering.pop(number, None):  # it has not been given up
            self.answers.append((number, result, error))
            self.changed.set()


class BatchedActor:
    """Base of actors that take `BatchedCalls`."""

    @cached_property
    def _callers(self) -> defaultdict[str, _Caller]:
        return defaultdict(_Caller)

    async def exchange(self, caller: str, requests: Sequence[Request]) -> list[Answer]:
        """Begin requests, or cancel them, and wait for an answer to any of the caller's."""
        known = self._callers[caller]
        for request in requests:
            number, method, *_ = request
            if number in known.answering:
                known.answering.pop(number).cancel()
            elif not method:
                known.given_up.add(number)
            elif number not in known.given_up:
                work = known.answer(self, request)
                known.answering[number] = asyncio.create_task(work, name=method)
        known.changed.set()  # a call that waits returns
        known.changed = changed = asyncio.Event()
        if known.answering and not known.answers:
            await changed.wait()
        answers, known.answers = known.answers, []
        if not (known.answering or known.given_up) and self._callers.get(caller) is known:
            del self._callers[caller]
        return answers


class BatchedCalls:
    """The requests of one event loop to one actor, which need not be a `BatchedActor`."""

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle
        self._caller = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[object]] = {}
        self._unsent: list[Request] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self._is_due = False  # a call begins in the loop's next turn

    def ask(self, method: str, *arguments: object, **named: object) -> Awaitable[object]:
        """The answer of a method; to cancel it gives the request up."""
        if not hasattr(self.handle, "exchange"):
            answer: Awaitable[object] = getattr(self.handle, method).remote(*arguments, **named)
            return answer
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        future.add_done_callback(partial(self._done, number))
        self._send((number, method, arguments, named))
        return future

    def _done(self, number: int, _: asyncio.Future[object]) -> None:
        if self._waiting.pop(number, None):  # it has not been answered
            self._send((number, "", (), {}))

    def _send(self, *requests: Request) -> None:
        """Begin a call if one has something to bring, or has to wait for answers."""
        self._unsent += requests
        most = NUM_UNDER_WAY if self._unsent else bool(self._waiting)
        if not self._is_due and len(self._under_way) < most:
            self._is_due = True
            self._under_way.add(asyncio.create_task(self._call(), name="exchange"))

    async def _call(self) -> None:
        self._is_due = False
        requests, self._unsent = self._unsent, []
        answers: list[Answer]
        try:
            answers = await self.handle.exchange.remote(self._caller, requests)
        except Exception as error:
            answers = [(number, None, error) for number in self._lost_by(error, requests)]
        for number, result, failure in answers:
            future = self._waiting.pop(number, None)
            if future and not future.done():
                future.set_exception(failure) if failure else future.set_result(result)
        self._under_way -= {asyncio.current_task()}
        self._send()

    def _lost_by(self, error: Exception, requests: Sequence[Request]) -> list[int]:
        """The requests that a failed call leaves without an answer.

        With a call of Ray those of all that was sent are lost. Another error, as of what cannot be
        pickled, was raised before these left.
        """
        from ray.exceptions import RayError

        if not isinstance(error, RayError):
            return [number for number, *_ in requests]
        unsent = {number for number, *_ in self._unsent}
        return [number for number in self._waiting if number not in unsent]
