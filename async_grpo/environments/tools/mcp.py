"""Tools of a server of the Model Context Protocol: a command that is started here, or a URL.

    server = McpServer(["uvx", "some-server"])    # by its standard input and output
    server = McpServer("http://127.0.0.1:8000/mcp")
    Toolbox(await server.tools())

`McpServer` connects before the first request, and again after a connection was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectSendStream
from mcp import Client, MCPError, types
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage

from async_grpo.environments.chat.messages import tool_spec
from async_grpo.environments.tools.base import ToolMistake
from async_grpo.util.deadlines import TOOL_SERVER_S
from async_grpo.util.errors import ServerAway

logger = logging.getLogger(__name__)
MAX_BYTES = 16 << 20  # of one answer
Incoming = MemoryObjectSendStream[SessionMessage | Exception]
Outgoing = AsyncIterable[SessionMessage]
Streams = tuple[Any, Any]  # messages from the server, and to it; their types are not public
Call = Mapping[str, object]


class McpServer:
    """One server and its connection, for one event loop."""

    def __init__(
        self, server: str | Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> None:
        """`server`: a URL, or the words of a command, which gets `environment` and not ours."""
        self._server = server
        self._environment = dict(environment or {})
        self._making = asyncio.Lock()
        self._serving: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._answered_s = 0.0
        self._unsent: list[Call] = []  # calls of this connection that did not reach the server

    async def tools(self) -> tuple[McpTool, ...]:
        """The tools of the server; raises any error of the connection."""
        client = await self._connected()
        async with asyncio.timeout(TOOL_SERVER_S):
            page = await client.list_tools()
            listed = list(page.tools)
            while page.next_cursor:
                page = await client.list_tools(cursor=page.next_cursor)
                listed += page.tools
        return tuple(McpTool(self, tool) for tool in listed)

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Call a tool; raises `ToolMistake` for an error that the server reports."""
        client, asked_s = await self._connected(), time.monotonic()
        try:
            result = await client.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.code == types.INVALID_PARAMS:
                raise ToolMistake(error.message) from error
            self._lose(client)
            if any((call.get("name"), call.get("arguments")) == (name, arguments)
                   for call in self._unsent):  # fmt: skip
                raise ServerAway(f"{self._server} has not got the call: {error}") from error
            if error.code == types.CONNECTION_CLOSED:
                raise ConnectionError(f"{self._server}: {error}") from error
            raise
        except BaseException:  # cancelled too: a server that answered no other call is lost
            if self._answered_s < asked_s:
                self._lose(client)
            raise
        self._answered_s = time.monotonic()
        text = _text_of(result)
        if result.is_error:
            raise ToolMistake(text)
        return text

    async def close(self) -> None:
        """End the connection, and the server if it is a command."""
        if self._serving:
            self._serving.cancel()
            await asyncio.wait({self._serving}, timeout=TOOL_SERVER_S)

    def _lose(self, client: Client) -> None:
        if client is self._client and self._serving:
            self._client = None
            self._serving.cancel()

    async def _connected(self) -> Client:
        async with self._making:
            if self._client is None or self._serving is None or self._serving.done():
                await self.close()
                made: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
                self._serving = asyncio.create_task(self._serve(made), name="mcp")
                try:
                    self._client = await asyncio.wait_for(made, TOOL_SERVER_S)
                except TimeoutError as error:
                    raise ServerAway(f"no tools of {self._server} in time") from error
                finally:
                    if not made.done() or made.cancelled() or made.exception():
                        self._serving.cancel()
            return self._client

    async def _serve(self, made: asyncio.Future[Client]) -> None:
        """Hold the connection, which has to end in the task that began it."""
        try:
            async with Client(self._transport()) as client:
                made.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:  # a server may cause any
            if made.done():
                logger.warning("the tools of %s have been lost: %r", self._server, error)
            elif isinstance(error, FileNotFoundError | PermissionError):
                made.set_exception(error)  # trying again would not help
            else:
                made.set_exception(ServerAway(f"no tools of {self._server}: {error!r}"))

    def _transport(self) -> AbstractAsyncContextManager[Streams]:
        if isinstance(self._server, str):
            self._unsent = []
            return _over_http(self._server, self._unsent)
        return _over_pipes(self._server, get_default_environment() | self._environment)


class McpTool:
    """One tool of a server; see `base.Tool`."""

    def __init__(self, server: McpServer, tool: types.Tool) -> None:
        self._server = server
        self._name = tool.name
        hints = tool.annotations or types.ToolAnnotations()
        self.is_idempotent = bool(hints.idempotent_hint or hints.read_only_hint)
        self.spec = tool_spec(tool.name, tool.description or "", tool.input_schema)

    async def call(self, arguments: Mapping[str, object]) -> str:
        """See `Tool`."""
        return await self._server.call(self._name, arguments)


def _text_of(result: types.CallToolResult) -> str:
    texts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    return "\n".join(texts) or json.dumps(result.structured_content or {})


@asynccontextmanager
async def _over_pipes(
    command: Sequence[str], environment: dict[str, str]
) -> AsyncIterator[Streams]:
    """Start a server. The transport of `mcp` would read a line of any length into memory."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
        limit=MAX_BYTES,
        start_new_session=True,
    )
    assert process.stdin and process.stdout, "both are pipes"
    received, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, to_send = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [
        asyncio.create_task(_receive(process.stdout, received)),
        asyncio.create_task(_send(process.stdin, to_send, received)),
    ]
    try:
        yield incoming, outgoing
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdin.close()
        await process.wait()


async def _receive(stdout: asyncio.StreamReader, received: Incoming) -> None:
    """Read a message a line; any other line ends the connection, as the server's end does."""
    async with received:
        try:
            while line := await stdout.readline():
                message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                await received.send(SessionMessage(message))
        except ValueError as error:
            logger.warning("a server of tools wrote what is no message: %s", str(error)[:500])


async def _send(stdin: asyncio.StreamWriter, to_send: Outgoing, received: Incoming) -> None:
    async for each in to_send:
        text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
        stdin.write(text.encode() + b"\n")
        try:
            await stdin.drain()
        except ConnectionError:  # the server has ended
            await received.aclose()


@asynccontextmanager
async def _over_http(url: str, unsent: list[Call]) -> AsyncIterator[Streams]:
    timeout = httpx2.Timeout(TOOL_SERVER_S, read=None)  # a call has another deadline
    async with (
        httpx2.AsyncClient(
            transport=_BoundedAnswers(unsent),
            timeout=timeout,
            headers={"Accept-Encoding": "identity"},
        ) as http,
        streamable_http_client(url, http_client=http, max_sse_event_size=MAX_BYTES) as streams,
    ):
        yield streams


class _BoundedAnswers(httpx2.AsyncHTTPTransport):
    """Refuses answers of more than `MAX_BYTES`; `mcp` itself bounds streams of events."""

    def __init__(self, unsent: list[Call]) -> None:
        super().__init__()
        self._unsent = unsent

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await super().handle_async_request(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            if request.method == "POST":
                self._unsent.append(json.loads(request.content).get("params") or {})
            raise
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return response
        if "content-encoding" in response.headers:  # few bytes may decode to many
            raise httpx2.ReadError("an encoded answer, which was not asked for")
        content, stream = bytearray(), response.stream
        assert isinstance(stream, httpx2.AsyncByteStream), "the request was an asynchronous one"
        try:
            async for chunk in stream:
                content += chunk
                if len(content) > MAX_BYTES:
                    raise httpx2.ReadError(f"an answer of more than {MAX_BYTES} bytes")
        finally:
            await stream.aclose()
        response.stream = httpx2.ByteStream(bytes(content))
        return response
