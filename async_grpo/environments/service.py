"""A service: workers of the user's own, which environments ask as `services["calculator"]`.

    class Calculator(Service):
        capacity = 64

        async def answer(self, request):
            return evaluate(request)

consumes:     requests, at most `capacity` at a time
produces:     what the class answers
waits for:    the class, whose code runs in this process alone
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
    """Derive, say `capacity`, and write `answer`: one object answers all requests of a worker.

    It is made without arguments, in the process of its worker, and loads there what it needs.
    """

    capacity: int  # requests that a worker answers at a time
    devices: int = 0  # of each worker, on a machine that has any
    answer_within_s: float = SERVICE_ANSWER_S  # else whoever asks gets an error

    async def answer(self, request: Any) -> Any:
        """The answer to a request; both are plain values, such as texts, lists, dicts and arrays.

        A request whose worker was lost is asked again elsewhere. All requests of a worker share one
        event loop: what blocks it goes to `await asyncio.to_thread(...)`. What is raised here fails
        the group of whoever has asked: a mistake of the model is an answer too.
        """
        raise NotImplementedError(f"{type(self).__name__} must say what it answers")


class ServiceWorker:
    """Wrap with `ray.remote(max_concurrency=1000)`; every request is a coroutine of its own."""

    def __init__(
        self,
        make: Callable[[], Service],
        *,
        stated: WorkerInfo,
        devices: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """`make`: what answers, called here once; `stated`: what its dispatcher knows of it."""
        self._make = make
        self._stated = stated
        self._devices = devices
        self._service: Service | None = None
        self._answering: set[asyncio.Task[object]] = set()

    async def info(self) -> WorkerInfo:
        """Who this worker is; answers once its service is made.

        Raises `ConfigError` for a class that is no service, `WorkerError` for one that cannot be.
        """
        with self._told("cannot be made:"):
            self._service = await asyncio.to_thread(self._make)
        return replace(
            self._stated,
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            devices=self._devices(),
        )

    async def ping(self, after_s: float = 0.0) -> Pulse:
        """This process lives; nobody knows how far an answer is."""
        await asyncio.sleep(after_s)
        return Pulse("none")

    async def abort_all(self) -> None:
        """End every running request, for a caller that is gone."""
        for answering in self._answering:
            answering.cancel()

    async def answer(self, request: object) -> object:
        """One answer; one to a `ServiceRequest` is packed as that is.

        Raises `WorkerError` for what the service raises, and `DeadlineError` where it is late.
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
                with self._told("raised"):
                    if not isinstance(request, ServiceRequest):
                        return await service.answer(request)
                    return packed(await service.answer(unpacked(request.content)))
        except TimeoutError:  # the service's own has become another
            within = f"within {service.answer_within_s:g} s"
            raise DeadlineError(f"{self._who} gave no answer {within}") from None

    @property
    def _who(self) -> str:
        return f"{self._stated.role.replace(':', ' ')} of {self._stated.model_path}"

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Within, whatever the service raises becomes an error that names its line."""
        try:
            yield
        except AsyncGrpoError:
            raise
        except (Exception, SystemExit) as error:  # the user's own code may raise anything
            named = UserCode(self._stated.model_path, "")
            line = named.line_in(traceback.extract_tb(error.__traceback__))
            raise WorkerError(f"{self._who} {what} {error!r} at {line}") from error


def make_service(code: UserCode) -> Service:
    """Import and make it: in the processes of its workers only."""
    return code.load(Service)()
