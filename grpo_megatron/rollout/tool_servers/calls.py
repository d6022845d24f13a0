"""MCP servers of one process: they are started, called, and started again when they die."""

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Sequence
from functools import cache
from typing import Any, TypeVar

from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.rollout.tool_servers.connection import (
    SessionForgotten,
    SessionLost,
    ToolRefused,
    ToolSession,
)
from grpo_megatron.rollout.tool_servers.settings import ToolServer

T = TypeVar("T")
Schemas = list[dict[str, Any]]


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all sessions of this process, which runs in a thread of its own.

    So sessions answer their servers also while this process runs other code.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="tool servers", daemon=True).start()
    return loop


def _wait(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


def _awaitable(coroutine: Coroutine[Any, Any, T]) -> Awaitable[T]:
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, _loop()))


_listed: dict[str, Schemas] = {}


def list_tools(servers: Sequence[ToolServer]) -> list[Schemas]:
    """Return the JSON schemas of the tools of each server.

    A server runs only meanwhile. It is asked once in this process: later calls return the same schemas.

    Raises UserError if a server cannot be used.
    """

    async def listed(server: ToolServer) -> Schemas:
        session = await ToolSession.open(server, is_logged=False)
        await session.close()
        return session.schemas

    async def all_listed(missing: dict[str, ToolServer]) -> list[Schemas]:
        return await asyncio.gather(*map(listed, missing.values()))

    missing = {repr(server): server for server in servers if repr(server) not in _listed}
    if missing:
        _listed.update(zip(missing, _wait(all_listed(missing)), strict=True))
    return [_listed[repr(server)] for server in servers]


class RunningServer:
    """An MCP server in use. If it dies, it is started again, unless its session belongs to one episode."""

    def __init__(self, server: ToolServer, seconds: float, schemas: Schemas | None = None):
        """Store the settings. The first call, or `start`, starts the server.

        seconds: time limit of a call, unless the server has its own.
        schemas: JSON schemas of the tools that the server must list. None: those of its first session.
        """
        self.server, self.schemas = server, schemas
        self._seconds = server.settings.timeout or seconds
        # Its result is the session. A start goes on if a call that waits for it runs out of time.
        self._opening: asyncio.Task[ToolSession] | None = None
        self._alone = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        """Names of the tools, as the model sees them."""
        return [schema["function"]["name"] for schema in self.schemas]

    async def _started(self) -> ToolSession:
        """Return the session. Start the server if there is none, or if the last start failed."""
        if self._opening is None or (self._opening.done() and self._session() is None):
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    def _session(self) -> ToolSession | None:
        """Return the session that the last start has opened; None if it failed or goes on."""
        opening = self._opening
        if opening is None or not opening.done() or opening.cancelled() or opening.exception():
            return None
        return opening.result()

    async def _open(self) -> ToolSession:
        session = await ToolSession.open(self.server)
        if self.schemas is not None and (problem := difference(self.schemas, session.schemas)):
            await session.close()
            raise UserError(f"{self.server.setting}: the server {problem}")
        self.schemas = session.schemas
        return session

    def call(self, name: str, arguments: dict[str, Any]) -> Awaitable[str]:
        """Call a tool, and return its result as text.

        name: name of the tool, as the model sees it.

        Raises ToolRefused if the tool fails or takes too long, and UserError if the server dies.
        """
        return _awaitable(self._call(name.removeprefix(self.server.settings.prefix), arguments))

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        session = await self._started()
        try:
            return await session.call(name, arguments, self._seconds)
        except SessionLost as error:
            await self._drop(session)
            if not self.server.is_shared:
                raise UserError(
                    f"{self.server.setting}: the session of an episode was lost in a call of {name}: {error}"
                ) from error
        # One call at a time, so that a call that kills the server does not fail others twice.
        async with self._alone:
            session = await self._started()
            try:
                return await session.call(name, arguments, self._seconds)
            except SessionForgotten as error:  # no: the session is new, so the request is invalid
                raise ToolRefused(str(error)) from error
            except SessionLost as error:
                await self._drop(session)
                raise UserError(
                    f"{self.server.setting}: the server was lost in a call of {name}, was started again, and "
                    f"was lost again: {error}; arguments: {json_text(arguments)[:200]}"
                ) from error

    async def _drop(self, session: ToolSession) -> None:
        """Close a lost session, so that the next call opens a new one, unless another call has done so."""
        if self._session() is session:
            self._opening = None
        await session.close()

    async def _close(self) -> None:
        if self._opening is None:
            return
        self._opening.cancel()
        await asyncio.wait([self._opening])
        if session := self._session():
            await session.close()

    def close(self) -> Awaitable[None]:
        return _awaitable(self._close())


def start(servers: Sequence[RunningServer]) -> None:
    """Start servers, all at the same time, so that their `schemas` are known.

    Servers that serve single episodes are then ended: each episode starts its own.

    Raises UserError if a server cannot be used.
    """

    async def started(running: RunningServer) -> None:
        session = await running._started()
        if not running.server.is_shared:
            await running._drop(session)

    async def all_started() -> None:
        await asyncio.gather(*map(started, servers))

    if servers:
        _wait(all_started())


def difference(expected: Schemas, found: Schemas) -> str | None:
    """Return how a list of tools differs from the expected one, as the rest of a sentence; None if equal."""
    before = {schema["function"]["name"]: schema for schema in expected}
    now = {schema["function"]["name"]: schema for schema in found}
    if gone := [name for name in before if name not in now]:
        return f"no longer lists {', '.join(gone)}; prompts show these tools to the model"
    if new := [name for name in now if name not in before]:
        return f"also lists {', '.join(new)}; prompts do not show these tools to the model"
    if other := [name for name in now if now[name] != before[name]]:
        return f"describes {', '.join(other)} otherwise than in the prompts"
    return None
