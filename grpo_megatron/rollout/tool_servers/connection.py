"""A session with an MCP server: starting it, listing its tools, and calling them.

All of it runs in the event loop of tool_servers.calls.
"""

import asyncio
import os
import re
import shutil
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from grpo_megatron.errors import UserError, described, shortened
from grpo_megatron.files import json_text
from grpo_megatron.rollout.tool_servers.diagnostics import ErrorOutput, HttpStatus
from grpo_megatron.rollout.tool_servers.settings import ToolServer

# The version that the tests use.
_PACKAGE = "mcp==2.3.0"
_GROUP = Path(__file__).with_name("group.py")
# What the client says about an answer with an HTTP status of at least 400.
_HTTP_FAILED = "Server returned an error response"
# Time that a session gets to close, in addition to the client's own limits.
_CLOSE_SECONDS = 10.0
# Names of tools that every format of calls can write: those of the protocol, and `:`.
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class SessionLost(Exception):
    """Error: the connection to an MCP server has ended, for example because its process died."""


class SessionForgotten(SessionLost):
    """Error: a server over HTTP calls a request invalid, as it does if it has forgotten the session."""


class ToolRefused(ValueError):
    """Error of a tool, as the server describes it to the model."""


class ToolSession:
    """A session with an MCP server, and the server's process if a command starts it.

    schemas: JSON schemas of the tools that the model may call, in the form of chat templates
    """

    def __init__(self, server: ToolServer, is_logged: bool):
        self.schemas: list[dict[str, Any]] = []
        self._server = server
        self._errors = ErrorOutput(is_logged) if server.settings.command else HttpStatus()
        self._ready: asyncio.Future = asyncio.get_running_loop().create_future()
        self._closing, self._client = asyncio.Event(), None
        # One task enters and leaves the client's contexts, as anyio requires.
        self._task = asyncio.create_task(self._live())

    @classmethod
    async def open(cls, server: ToolServer, is_logged: bool = True) -> "ToolSession":
        """Start a session, and list the server's tools.

        is_logged: True if the stderr of a process is copied to stderr of this process.

        Raises UserError if that fails, with the end of the process's stderr.
        """
        session, seconds = cls(server, is_logged), server.settings.start_timeout
        try:
            await asyncio.wait_for(asyncio.shield(session._ready), seconds)
        except asyncio.TimeoutError:
            await session.close()
            raise session._failed(f"gave no list of its tools within {seconds:g} s") from None
        except UserError:
            raise
        except Exception as error:
            await session.close()
            raise session._failed(f"could not be used: {described(error)}") from error
        except asyncio.CancelledError:
            await session.close()
            raise
        return session

    def _failed(self, how: str) -> UserError:
        what = "server" if self._server.settings.url else "program"
        return UserError(
            f"{self._server.setting}: the {what} {self._server.target} {how}{self._errors.end()}"
        )

    async def _live(self) -> None:
        """Enter the client's contexts, and leave them when the session is to close."""
        try:
            async with AsyncExitStack() as stack:
                self._client = await stack.enter_async_context(_client(self._server, self._errors))
                self.schemas = [self._schema(tool) for tool in await self._listed()]
                self._ready.set_result(None)
                await self._closing.wait()
        except BaseException as error:  # also the cancellation
            if not self._ready.done():
                first = _first(error)
                if isinstance(first, Exception):
                    self._ready.set_exception(first)
                else:
                    self._ready.cancel()
        finally:
            self._errors.close()

    async def _listed(self) -> list[Any]:
        found, cursor = [], None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        wanted, names = self._server.settings.tools, [tool.name for tool in found]
        key = f"rollout.mcp.{self._server.name}.tools"
        for name in wanted:
            if name not in names:
                raise UserError(
                    f"{key}: the server has no tool {name!r}; it has {', '.join(names) or 'none'}"
                )
        if not found:
            raise UserError(f"{self._server.setting}: the server has no tools; remove it from rollout.tools")
        return [tool for tool in found if not wanted or tool.name in wanted]

    def _schema(self, tool: Any) -> dict[str, Any]:
        name = self._server.settings.prefix + tool.name
        if not _NAME.fullmatch(name):
            raise UserError(
                f"{self._server.setting}: a tool has the name {shortened(name)!r}, but models can only write "
                "names of 1 to 128 letters, digits and _.:/- in their calls; leave it out with "
                f"rollout.mcp.NAME.tools"
            )
        shown = {
            "name": name,
            "description": tool.description or "",
            "parameters": tool.input_schema,
        }
        return {"type": "function", "function": shown}

    async def call(self, name: str, arguments: dict[str, Any], seconds: float) -> str:
        """Call a tool, and return its result as text.

        name: name of the tool on the server.
        seconds: time limit.

        Raises ToolRefused if the tool fails or takes too long, SessionLost if the connection ends, and
        SessionForgotten.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST, REQUEST_TIMEOUT

        if self._task.done():
            raise SessionLost("it has ended")
        try:
            result = await self._client.call_tool(name, arguments, read_timeout_seconds=seconds)
        except MCPError as error:
            # The client's text for HTTP status 5xx is no answer of the tool.
            no_answer = error.code == INTERNAL_ERROR and str(error) == _HTTP_FAILED
            if no_answer or error.code == CONNECTION_CLOSED:
                raise SessionLost(f"{error}{self._errors.end()}") from error
            if error.code == INVALID_REQUEST and self._server.settings.url:
                raise SessionForgotten(str(error)) from error
            if error.code == REQUEST_TIMEOUT:
                raise ToolRefused(f"{name} took longer than {seconds:g} s") from error
            raise ToolRefused(str(error)) from error
        text = _text(result)
        if result.is_error:
            raise ToolRefused(text)
        return text

    async def close(self) -> None:
        """End the session, and the server's process with its group."""
        self._closing.set()
        if not self._ready.done():
            self._task.cancel()
        await asyncio.wait([self._task], timeout=_CLOSE_SECONDS)


def _text(result: Any) -> str:
    """Return the content of a tool's result as text, with a note about each part that is no text."""
    parts = []
    for part in result.content:
        resource = getattr(part, "resource", None)
        text = getattr(part, "text", None) if resource is None else getattr(resource, "text", None)
        parts.append(f"({part.type} left out)" if text is None else text)
    if not parts and result.structured_content is not None:
        return json_text(result.structured_content)
    return "\n".join(parts)


@asynccontextmanager
async def _client(server: ToolServer, errors: ErrorOutput | HttpStatus):
    """Start a server or connect to it, and yield the official client.

    errors: gets the stderr of the process, or the HTTP responses.
    """
    settings, variables = server.settings, server.variables()
    if settings.command:
        _must_exist(server)
    try:
        import httpx2
        from mcp import Client
        from mcp.client.stdio import StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client
    except ImportError as error:
        raise UserError(
            f"{server.setting} needs the official client, version 2 or later: pip install {_PACKAGE} "
            f"({error})"
        ) from error
    async with AsyncExitStack() as stack:
        if settings.command:
            environment = settings.env | variables
            # Without -I, Python would put the folder of group.py into the module search path.
            arguments = ["-I", str(_GROUP), str(os.getpid()), *settings.command]
            parameters = StdioServerParameters(
                command=sys.executable, args=arguments, env=environment, encoding_error_handler="replace"
            )
            transport = stdio_client(parameters, errlog=errors.file)
        else:
            headers = dict(settings.headers)
            if settings.token_env:
                headers["Authorization"] = f"Bearer {variables[settings.token_env]}"
            # The client's own time limits: a server may hold a response open.
            limits = httpx2.Timeout(30.0, read=300.0)
            http = httpx2.AsyncClient(
                headers=headers, timeout=limits, event_hooks={"response": [errors.note]}
            )
            await stack.enter_async_context(http)
            transport = streamable_http_client(settings.url, http_client=http)
        yield await stack.enter_async_context(Client(transport, cache=None))


def _must_exist(server: ToolServer) -> None:
    program = server.settings.command[0]
    if shutil.which(program, path=server.settings.env.get("PATH")) is None:
        raise UserError(
            f"{server.setting}: there is no program {program!r}, and no server rollout.mcp.{server.name}"
            if server.settings.command == [server.name]
            else f"{server.setting}: there is no program {program!r} on this machine"
        )


def _first(error: BaseException) -> BaseException:
    """Return the first error in nested exception groups, in which anyio raises errors of its tasks."""
    while inner := getattr(error, "exceptions", None):
        error = inner[0]
    return error
