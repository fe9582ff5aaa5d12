"""Listens for the gateway on the event loop that starts it."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from async_grpo.util.deadlines import GATEWAY_ENDED_S, GATEWAY_HEAD_S
from async_grpo.util.errors import ConfigError

LOOPBACK = "127.0.0.1"


class Server:
    """One application at one address; raises `ConfigError` where nothing can listen."""

    def __init__(self, app: ASGIApp, *, host: str = LOOPBACK, port: int = 0) -> None:
        """Port 0: any that is free."""
        self._socket = listening(host, port)
        # asyncio does so for sockets that name their protocol only; without it, 40 ms a request.
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
        """Until `stop`, or in a main thread until a signal."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Take no more requests; those that run have a little while."""
        self._server.should_exit = True


class _InTime(HttpToolsProtocol):
    """Closes connections on which a request's head does not come: uvicorn waits for ever."""

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
    """A socket there; raises `ConfigError`, where uvicorn would end the process."""
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise ConfigError(
            "a gateway must listen at an address of this machine that is free, got "
            f"{host}:{port} ({error.strerror or error}): choose another"
        ) from error


def in_background(server: Server) -> asyncio.Task[None]:
    """The task that serves, which its caller holds."""
    return asyncio.create_task(server.serve(), name=f"gateway-{server.url}")
