"""The gateway's server: sessions under secret keys, and the routes of OpenAI's API."""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError

from grpo_megatron.errors import UserError
from grpo_megatron.rollout.gateway.openai import ChatRequest, completion, events
from grpo_megatron.rollout.gateway.session import AgentSession, NoRoom
from grpo_megatron.rollout.gateway.shared import SharedSessions

logger = logging.getLogger(__name__)

# Maximum bytes of a request's body.
_LONGEST_BODY = 64 << 20
# Seconds between two checks whether a client still waits.
_LOOK_SECONDS = 0.2


class _ClientIsGone(Exception):
    """The client of a request has closed its connection."""


@dataclass
class Ticket:
    """A session that the gateway serves: its id and key, which the agent needs, and its end.

    ended: the body of the agent's request to end the session, such as {"reward": 1.0}
    """

    session: AgentSession
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    ended: "asyncio.Future[dict[str, Any]]" = field(default_factory=asyncio.Future)


class Gateway:
    """An HTTP server through which agents make requests to their sessions. It listens on loopback.

    model: name of the model, as clients see it
    port: the port that it listens on, after `start`
    shared: sessions of a client that has one key for all of them
    """

    def __init__(self, model: str = "policy"):
        """Create a gateway without sessions, which does not listen yet.

        model: name of the model, as clients see it.
        """
        self.model, self._tickets, self.shared = model, {}, SharedSessions()
        self.app = self._app()
        self.port = 0
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task | None = None

    async def start(self) -> None:
        """Listen on a free port, in the running event loop."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self.shared.before(self.app), log_level="warning", lifespan="off", access_log=False
        )
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # the process has its own
        self._serving = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._serving

    def open(self, session: AgentSession) -> Ticket:
        """Serve a session from now on. Must be called in the event loop of `start`."""
        ticket = Ticket(session)
        self._tickets[ticket.key] = ticket
        return ticket

    async def close(self, ticket: Ticket) -> None:
        """Serve a session no more, and end its requests."""
        del self._tickets[ticket.key]
        await ticket.session.close()

    def url(self, ticket: Ticket) -> str:
        """Return the base URL of a session, for OpenAI's client. It also needs the session's key."""
        return f"http://127.0.0.1:{self.port}/sessions/{ticket.id}/v1"

    @property
    def shared_url(self) -> str:
        """Base URL for the client of the shared sessions."""
        return f"http://127.0.0.1:{self.port}/v1"

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        for prefix in ("", "/sessions/{session_id}"):
            app.get(f"{prefix}/v1/models")(self._models)
            app.post(f"{prefix}/v1/chat/completions")(self._chat)
        app.post("/sessions/{session_id}/complete")(self._complete)
        app.exception_handler(HTTPException)(_as_error)
        return app

    def _ticket(self, request: Request) -> Ticket:
        """Return the session that a request's key belongs to. Raises HTTPException without a valid key.

        If the path names a session, the key must be that of this session.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        ticket = self._tickets.get(key)
        if ticket is None or request.path_params.get("session_id", ticket.id) != ticket.id:
            raise HTTPException(401, "the key is missing or not that of a session")
        return ticket

    async def _models(self, request: Request) -> dict[str, Any]:
        self._ticket(request)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "grpo_megatron"}
        return {"object": "list", "data": [model]}

    async def _chat(self, request: Request) -> Response:
        ticket = self._ticket(request)
        try:
            asked = ChatRequest.model_validate_json(await _body(request))
            asked.check()
        except (ValidationError, UserError) as error:
            raise HTTPException(400, str(error)) from error
        key = request.headers.get("idempotency-key") or asked.key
        answering = ticket.session.chat(key, asked.messages, asked.offered_tools, asked.limit)
        try:
            answer = await _while_connected(request, answering)
        except _ClientIsGone:
            return Response(status_code=499)
        except NoRoom as error:
            raise HTTPException(400, {"message": str(error), "code": "context_length_exceeded"}) from error
        except UserError as error:
            raise HTTPException(400, str(error)) from error
        body = completion(answer, asked.model or self.model, asked.return_token_ids)
        if not asked.stream:
            return JSONResponse(body)
        with_usage = bool((asked.stream_options or {}).get("include_usage"))
        return StreamingResponse(events(body, with_usage), media_type="text/event-stream")

    async def _complete(self, request: Request) -> dict[str, Any]:
        """End a session. The body is {"reward": number} or {"failed": text} or {"leave_out": true}."""
        ticket = self._ticket(request)
        try:
            body = await request.json()
        except ValueError as error:
            raise HTTPException(400, f"the body must be JSON: {error}") from error
        if not isinstance(body, dict) or len(body.keys() & {"reward", "failed", "leave_out"}) != 1:
            raise HTTPException(400, "the body must be an object with one of reward, failed and leave_out")
        if not ticket.ended.done():
            ticket.ended.set_result(body)
        return {"id": ticket.id, "turns": ticket.session.trajectory.turns}


async def _body(request: Request) -> bytes:
    """Read the body of a request. Raises HTTPException if it is too long."""
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > _LONGEST_BODY:
            raise HTTPException(413, f"the body of a request may have {_LONGEST_BODY >> 20} MiB")
    return b"".join(parts)


async def _while_connected(request: Request, answering: Awaitable[Any]) -> Any:
    """Wait for an answer, and return it. If the client goes away before, cancel the answer.

    Raises _ClientIsGone if the client has closed its connection.
    """
    task = asyncio.ensure_future(answering)
    try:
        while not (await asyncio.wait([task], timeout=_LOOK_SECONDS))[0]:
            if await request.is_disconnected():
                raise _ClientIsGone
        return task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def _as_error(request: Request, error: HTTPException) -> JSONResponse:
    """Return an error as OpenAI's API does."""
    detail = error.detail if isinstance(error.detail, dict) else {"message": error.detail}
    kinds = {401: "authentication_error", 400: "invalid_request_error"}
    body = {"type": kinds.get(error.status_code, "api_error"), "code": None, "param": None} | detail
    return JSONResponse({"error": body}, error.status_code)
