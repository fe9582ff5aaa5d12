"""The HTTP application: a route for each kind of request, and the same routes below /s/NAME.

A `Server` listens for it on the event loop that starts it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import uvicorn
from openai.types import Model
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from async_grpo.gateway import wire
from async_grpo.gateway.answer_plan import AnswerPlan, chat_plan, completion_plan, generation
from async_grpo.gateway.answers import AnsweredChoice, event, generated
from async_grpo.gateway.responses import ResponsesRequest, response_plan
from async_grpo.gateway.session import Session, Sessions, TurnRequest
from async_grpo.gateway.wire import Asked, Refused
from async_grpo.types import Turn
from async_grpo.util.deadlines import GATEWAY_BODY_S, GATEWAY_ENDED_S, GATEWAY_HEAD_S
from async_grpo.util.errors import AsyncGrpoError, ConfigError
from async_grpo.util.ports import LOOPBACK
from async_grpo.util.waiting import together

logger = logging.getLogger(__name__)
T = TypeVar("T")
S = TypeVar("S", bound=wire.SamplingRequest)
CLIENT_GONE = 499


def make_app(sessions: Sessions) -> ASGIApp:
    """The application that serves these sessions."""
    endpoints = _Endpoints(sessions)
    routes = [
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/responses", endpoints.response, methods=["POST"]),
        Route("/v1/completions", endpoints.completion, methods=["POST"]),
        Route("/v1/models", endpoints.models),
        Route("/inference/v1/generate", endpoints.generate, methods=["POST"]),
    ]
    named = [
        Route("/s/{session}", endpoints.end, methods=["DELETE"]),
        Mount("/s/{session}", routes=[*routes, Route("/turns", endpoints.turns)]),
    ]
    handlers: dict[Any, Any] = {
        AsyncGrpoError: _refusal,
        HTTPException: _http_refusal,
        ClientDisconnect: lambda request, error: Response(status_code=CLIENT_GONE),
    }
    app = Starlette(routes=[*routes, *named], exception_handlers=handlers)
    return _AtMost(app, sessions.limits.requests)


class _Endpoints:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def chat(self, request: Request) -> Response:
        return await self._answered(request, wire.ChatRequest, chat_plan)

    async def response(self, request: Request) -> Response:
        return await self._answered(request, ResponsesRequest, response_plan)

    async def completion(self, request: Request) -> Response:
        return await self._answered(request, wire.CompletionRequest, completion_plan)

    async def generate(self, request: Request) -> Response:
        session, asked = await self._read(request, wire.GenerateRequest)
        self._check(session, asked.sampling_params, asked.model)
        if asked.stream:
            raise Refused("stream must be false here: leave it out")
        wanted = generation(session, asked.sampling_params, asked.token_ids)
        turns = await _unless_gone(request, _turns(session, wanted))
        choices = [generated(index, turn) for index, turn in enumerate(turns)]
        return JSONResponse({"request_id": asked.request_id, "choices": choices})

    async def models(self, request: Request) -> Response:
        sampler = self._find(request).sampler
        model = Model.construct(
            id=sampler.name or "policy",
            object="model",
            created=int(time.time()),
            owned_by="async-grpo",
            max_model_len=sampler.max_model_len,
        )
        return JSONResponse({"object": "list", "data": [model.to_dict()]})

    async def turns(self, request: Request) -> Response:
        turns = self._find(request, opens=False).turns
        data = [
            {"prompt_token_ids": list(sampled.prompt_ids), **generated(index, sampled.turn)}
            for index, sampled in enumerate(turns)
        ]
        return JSONResponse({"object": "list", "data": data})

    async def end(self, request: Request) -> Response:
        self._find(request, opens=False)
        self._sessions.close(request.path_params["session"])
        return Response(status_code=204)

    def _find(self, request: Request, *, opens: bool = True) -> Session:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        header = request.headers.get("x-session-id", "")
        name = request.path_params.get("session")
        return self._sessions.find(name, token=token, header=header, opens=opens)

    async def _read(self, request: Request, kind: type[Asked]) -> tuple[Session, Asked]:
        session, longest = self._find(request), self._sessions.limits.body_bytes
        body = bytearray()
        try:
            async with asyncio.timeout(GATEWAY_BODY_S):
                async for part in request.stream():
                    body += part
                    if len(body) > longest:
                        raise Refused(f"a request must have at most {longest} bytes: shorten it",
                                      status=413)  # fmt: skip
        except TimeoutError:
            raise Refused(f"a request's body must come within {GATEWAY_BODY_S:g} s: send it again",
                          status=408) from None  # fmt: skip
        return session, wire.read_request(bytes(body), kind)

    def _check(self, session: Session, asked: wire.SamplingRequest, model: str | None) -> None:
        asked.refuse_unserved(decides_sampling=session.sampler.decides_sampling)
        name = session.sampler.name
        if name and model not in (None, name):
            raise Refused(
                f"model must be {name!r}, got {model!r}: correct it, or leave it out",
                status=404,
                code="model_not_found",
            )

    async def _answered(
        self,
        request: Request,
        kind: type[S],
        make_plan: Callable[[Session, S], Awaitable[AnswerPlan]],
    ) -> Response:
        session, asked = await self._read(request, kind)
        self._check(session, asked, asked.model)
        plan = await make_plan(session, asked)
        if asked.stream:
            events = _events(session, plan)
            return StreamingResponse(events, media_type="text/event-stream")
        choices = await _unless_gone(request, _choices(session, plan))
        answer = plan.form.whole(choices, plan.num_prompt)
        content = answer.to_json(indent=None, warnings=False)
        return Response(content, media_type="application/json")


async def _choices(session: Session, plan: AnswerPlan) -> list[AnsweredChoice]:
    turns = await _turns(session, plan.turns)
    return [plan.choice(index, turn) for index, turn in enumerate(turns)]


async def _turns(session: Session, wanted: Sequence[TurnRequest]) -> list[Turn]:
    return await together(map(session.turn, wanted), name="turn")


async def _events(session: Session, plan: AnswerPlan) -> AsyncIterator[str]:
    """The events of an answer; those of several choices are sent when all have ended."""
    form, sent = plan.form, ""
    for each in form.begin():
        yield event(each)
    try:
        if len(plan.turns) > 1 or plan.so_far is None or plan.logprobs:
            choices = await _choices(session, plan)
        else:
            async for turn in session.pieces(plan.turns[0]):
                text = plan.so_far(turn.token_ids.tolist())
                if len(text) > len(sent):
                    for each in form.piece(text[len(sent) :]):
                        yield event(each)
                    sent = text
            choices = [plan.choice(0, turn)]
        for each in form.end(choices, plan.num_prompt, num_sent=len(sent)):
            yield event(each)
        yield form.last
    except AsyncGrpoError as error:  # the status of the answer has been sent
        yield f"data: {json.dumps(_as_refused(error).body())}\n\n"


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`; a client that disconnects cancels it, and its turns are not kept."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


class _AtMost:
    """Refuses requests beyond so many at a time; a stream counts until its end."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._num = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._num >= self._most:
            error = Refused(f"at most {self._most} requests are served at a time: ask again later",
                            status=429)  # fmt: skip
            await JSONResponse(error.body(), status_code=429)(scope, receive, send)
            return
        self._num += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num -= 1


def _refusal(request: Request, error: Exception) -> Response:
    refused = _as_refused(error)
    if refused.status >= 500:
        logger.warning("a request failed: %s", error)
    return JSONResponse(refused.body(), status_code=refused.status)


def _http_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path} is not served here: {error.detail}"
    return JSONResponse(Refused(what, status=error.status_code).body(), error.status_code)


def _as_refused(error: Exception) -> Refused:
    """The refusal for an error behind the gateway: 503, try again; 400 for a `ConfigError`."""
    status = 400 if isinstance(error, ConfigError) else 503
    return error if isinstance(error, Refused) else Refused(str(error), status=status)


class Server:
    """Serves an application at an address; raises `ConfigError` if it cannot listen there."""

    def __init__(self, app: ASGIApp, *, host: str = LOOPBACK, port: int = 0) -> None:
        """Port 0: any free port."""
        self._socket = listening(host, port)
        # Without it a request takes 40 ms; asyncio sets it only for sockets that name a protocol.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_InTime,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=round(GATEWAY_ENDED_S),
            )
        )

    async def serve(self) -> None:
        """Serve until `stop`; in the main thread also until a signal."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Take no more requests; running ones have `GATEWAY_ENDED_S` to end."""
        self._server.should_exit = True


class _InTime(HttpToolsProtocol):
    """Closes connections on which no request's head arrives; uvicorn would wait for ever."""

    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        is_served = self.cycle is not None and not self.cycle.response_complete
        if is_served and self._head_due:
            self._head_due.cancel()
            self._head_due = None
        elif not is_served and not self._head_due:
            self._head_due = self.loop.call_later(GATEWAY_HEAD_S, self.transport.close)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there; raises `ConfigError`, where uvicorn would end the process."""
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise ConfigError(
            "a gateway must listen at an address of this machine that is free, got "
            f"{host}:{port} ({error.strerror or error}): choose another"
        ) from error


def in_background(server: Server) -> asyncio.Task[None]:
    """The task that serves; the caller has to keep it."""
    return asyncio.create_task(server.serve(), name=f"gateway-{server.url}")
