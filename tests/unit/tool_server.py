"""An MCP server for tests, made with the official package.

python -m tests.unit.tool_server [MODE] [PORT]
"""

import asyncio
import os
import sys
import time

import uvicorn
from mcp import MCPError
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import INVALID_REQUEST

MODE = sys.argv[1] if len(sys.argv) > 1 else "plain"

if MODE == "broken":
    print("no database\x1b[2J here", file=sys.stderr)
    sys.exit(3)
if MODE == "silent":
    time.sleep(1000)
if MODE == "deaf" and os.fork() == 0:  # a child in the server's group, which does not read its input
    time.sleep(1000)

if MODE == "chatty":
    sys.stdout.buffer.write(b"listening \xff\x1b[2J\n")
    sys.stdout.flush()

server = MCPServer("tests")
state = {"count": 0}


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def count() -> str:
    """Count the calls."""
    state["count"] += 1
    return f"{state['count']} {os.getpid()} {os.getpgid(0)}"


@server.tool()
async def wait(seconds: float) -> str:
    """Wait for some time."""
    await asyncio.sleep(seconds)
    return f"waited {seconds}"


@server.tool()
def fail(text: str) -> str:
    """Fail with a text."""
    raise ToolError(text)


@server.tool()
def refuse() -> str:
    """Answer the request with an error of the protocol, as some servers do for bad arguments."""
    raise MCPError(INVALID_REQUEST, "no such page")


@server.tool(structured_output=False)
def picture() -> list:
    """Return a text and a picture."""
    return ["a dot", Image(data=b"\x89PNG", format="png")]


@server.tool()
def variable(name: str) -> str:
    """Return an environment variable."""
    return os.environ.get(name, "not set")


@server.tool()
def die(marker: str) -> str:
    """End the process, unless the file `marker` exists. It exists from the first death on."""
    if not os.path.exists(marker):
        if marker:
            open(marker, "w").close()
        print("planted death", file=sys.stderr, flush=True)
        os._exit(1)
    return "alive"


if MODE == "odd":

    @server.tool(name="my <tool>")
    def odd() -> str:
        """Have an odd name."""
        return ""


if MODE == "other":

    @server.tool()
    def search(query: str) -> str:
        """Search."""
        return query


def old(app):
    """Return an ASGI app that answers as servers of 2025 do: with sessions, and without `server/discover`."""

    async def answer(scope, receive, send):
        if scope["type"] != "http" or scope["method"] != "POST":
            return await app(scope, receive, send)
        message = await receive()
        if b'"server/discover"' not in message["body"]:
            return await app(scope, following(message, receive), send)
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def following(first, receive):
        waiting = [first]

        async def next_message():
            return waiting.pop() if waiting else await receive()

        return next_message

    return answer


if __name__ == "__main__":
    if MODE in ("http", "old"):
        app = server.streamable_http_app()
        uvicorn.run(old(app) if MODE == "old" else app, port=int(sys.argv[2]), log_level="error")
    else:
        server.run()
        if MODE == "deaf":
            time.sleep(1000)
