"""A server of tools that behaves, or does not: python tool_server.py [http PORT]."""

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

server = MCPServer("tools")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> str:
    """The sum."""
    return str(a + b)


@server.tool()
def refuse() -> str:
    """Fails as tools fail."""
    raise ToolError("not like this")


@server.tool()
def flood(size: int) -> str:
    """Says too much."""
    return "x" * size


@server.tool()
def die() -> str:
    """Ends its process."""
    os._exit(1)


@server.tool()
def hang() -> str:
    """Never answers."""
    time.sleep(3600)
    return "late"


if __name__ == "__main__":
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")
