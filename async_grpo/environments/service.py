"""Services: workers with a class of the user's, called as `services["calculator"]`.

    class Calculator(Service):
        capacity = 64

        async def answer(self, request):
            return evaluate(request)

consumes:     requests, at most `capacity` at a time
produces:     the answers of the class
waits for:    the class, whose code runs in processes of this worker only
unblocked by: its answer, or the deadline
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray

from async_grpo.types import Pulse, ServiceRequest, WorkerInfo
from async_grpo.types.message import packed, unpacked
from async_grpo.util.deadlines import SERVICE_ANSWER_S
from async_grpo.util.errors import AsyncGrpoError, DeadlineError, WorkerError
from async_grpo.util.user_code import UserCode


class Service:
    """Derive, set `capacity`, and write `answer`: one object answers all requests of a worker.

    The worker makes it in its process, where it loads what it needs.
    """

    capacity: int  # requests that a worker answers at a time
    devices: int = 0  # that each worker gets, on a machine that has any
    answer_within_s: float = SERVICE_ANSWER_S  # after that the caller gets an error

    async def answer(self, request: Any) -> Any:
        """The answer to a request; both are plain values, such as texts, lists, dicts and arrays.

        If a worker is lost, another one gets its requests. All requests of a worker share one event
        loop: put code that blocks it into `await asyncio.to_thread(...)`. An exception fails the
        group of the caller: return an answer for a mistake of the model.
        """
        raise NotImplementedError(f"{type(self).__name__} must say what it answers")


class ServiceWorker:
    """Wrap with `ray.remote(max_concurrency=1000)`; each request runs as another coroutine."""

    def __init__(
        self,
        make: Callable[[], Service],
        *,
        stated: WorkerInfo,
        devices: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """`make`: called here once; `stated`: `info` as far as the dispatcher knows it."""
        self._make = make
        self._stated = stated
        self._devices = devices
        self._service: Service | None = None
        self._answering: set[asyncio.Task[object]] = set()

    async def info(self) -> WorkerInfo:
        """Who this worker is; answers once its service is made.

        Raises `ConfigError` for a class that is no service, `WorkerError` if it cannot be made.
        """
        with self._naming_line("cannot be made:"):
            self._service = await asyncio.to_thread(self._make)
        return replace(
            self._stated,
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            devices=self._devices(),
        )

    async def ping(self, after_s: float = 0.0) -> Pulse:
        """That this process lives; the progress of an answer is not known."""
        await asyncio.sleep(after_s)
        return Pulse("none")

    async def abort_all(self) -> None:
        """Cancel every running request, when the caller is gone."""
        for answering in self._answering:
            answering.cancel()

    async def answer(self, request: object) -> object:
        """One answer; to a `ServiceRequest` it is packed as the request is.

        Raises `WorkerError` for what the service raises, and `DeadlineError` if it is late.
        """
        answering = asyncio.create_task(self._answered(request), name="answer")
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        return await answering

    async def _answered(self, request: object) -> object:
        service = self._service
        assert service, "whoever has given no `info` is not asked"
        try:
            async with asyncio.timeout(service.answer_within_s):
                with self._naming_line("raised"):
                    if not isinstance(request, ServiceRequest):
                        return await service.answer(request)
                    return packed(await service.answer(unpacked(request.content)))
        except TimeoutError:  # one that the service raises is a `WorkerError` by now
            within = f"within {service.answer_within_s:g} s"
            raise DeadlineError(f"{self._who} gave no answer {within}") from None

    @property
    def _who(self) -> str:
        return f"{self._stated.role.replace(':', ' ')} of {self._stated.model_path}"

    @contextmanager
    def _naming_line(self, what: str) -> Iterator[None]:
        """Within, an exception of the user's becomes a `WorkerError` that names its line."""
        try:
            yield
        except AsyncGrpoError:
            raise
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            named = UserCode(self._stated.model_path, "")
            line = named.line_in(traceback.extract_tb(error.__traceback__))
            raise WorkerError(f"{self._who} {what} {error!r} at {line}") from error


def make_service(code: UserCode) -> Service:
    """Import the class and make its object; called in processes of its workers only."""
    return code.make(code.load(Service))
