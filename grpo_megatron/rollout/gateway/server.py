"""The gateway's server: sessions under secret keys, and the routes of the protocols that it speaks."""

import asyncio
import contextlib
import json
import logging
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from grpo_megatron.errors import UserError, described
from grpo_megatron.rollout.gateway.anthropic import MessagesRequest
from grpo_megatron.rollout.gateway.connection import read_body, while_connected
from grpo_megatron.rollout.gateway.openai import ChatRequest
from grpo_megatron.rollout.gateway.session import AgentSession, NoRoom
from grpo_megatron.rollout.gateway.vllm import GenerateRequest
from grpo_megatron.rollout.gateway.wire import WireRequest

logger = logging.getLogger(__name__)

# Anthropic's client adds /v1 to its base URL, which OpenAI's client does not. So one base URL serves both.
_WIRES: dict[str, type[WireRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/messages": MessagesRequest,
    "/v1/v1/messages": MessagesRequest,
    "/inference/v1/generate": GenerateRequest,
}
# Seconds that an idle connection stays open. Clients keep theirs for 5 s, and must be the first to close.
_KEEP_SECONDS = 75


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
    """An HTTP server through which agents make requests to their sessions.

    model: name of the model, as clients see it
    port: the port that it listens on, after `start`
    """

    def __init__(self, model: str = "policy"):
        """Create a gateway without sessions, which does not listen yet.

        model: name of the model, as clients see it.
        """
        self.model = model
        self.port = 0
        self._tickets: dict[str, Ticket] = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task | None = None

    async def start(self) -> None:
        """Listen on a free port of loopback, in the running event loop."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            _Gate(self._app(), self._tickets),
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=_KEEP_SECONDS,
        )
        self._server = _Server(config)
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
        """Return the base URL of a session, for the clients of all protocols. They also need its key."""
        return f"http://127.0.0.1:{self.port}/sessions/{ticket.id}/v1"

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        for prefix in ("", "/sessions/{session_id}"):
            for path, wire in _WIRES.items():
                app.add_route(prefix + path, partial(self._ask, wire), ["POST"])
            for path in ("/v1/models", "/v1/v1/models"):
                app.add_route(prefix + path, self._models, ["GET"])
        app.add_route("/sessions/{session_id}/complete", _complete, ["POST"])
        app.exception_handler(HTTPException)(_as_error)
        return app

    async def _models(self, request: Request) -> Response:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "grpo_megatron"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _ask(self, wire: type[WireRequest], request: Request) -> Response:
        """Answer a request for a turn of the model, in the form that the client wants."""
        session = request.state.ticket.session
        with _errors_of_http(session):
            asked = wire.model_validate_json(await read_body(request.receive))
            asked.check()
            given = request.headers.get("idempotency-key")
            key = f"{wire.__name__} {given}" if given else asked.key
            answer = await while_connected(request.receive, asked.answer(session, key))
        body = asked.body(answer, self.model)
        if not asked.stream:
            return JSONResponse(body)
        return Response("".join(asked.events(body)), media_type="text/event-stream")


class _Server(uvicorn.Server):
    """A server that leaves the handling of signals to its process."""

    capture_signals = contextlib.nullcontext


class _Gate:
    """An ASGI application that lets requests with a session's key through to another application.

    If the path names a session, the key must be that of this session. Any other request gets the status 401,
    whatever its path. The session's ticket is in the request's state.
    """

    def __init__(self, app: ASGIApp, tickets: dict[str, Ticket]):
        self._app, self._tickets = app, tickets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ticket = self._ticket(scope)
        if ticket:
            scope.setdefault("state", {})["ticket"] = ticket
            await self._app(scope, receive, send)
            return
        with contextlib.suppress(HTTPException):
            await read_body(receive, 0)
        error = HTTPException(401, "the key is missing or not that of a session")
        response = await _as_error(Request(scope), error)
        await response(scope, receive, send)

    def _ticket(self, scope: Scope) -> Ticket | None:
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        key = key if scheme.lower() == "bearer" else headers.get(b"x-api-key", b"").decode("latin-1")
        ticket = self._tickets.get(key)
        named = scope["path"].removeprefix("/sessions/")
        is_other = named != scope["path"] and ticket and named.partition("/")[0] != ticket.id
        return None if is_other else ticket


@contextlib.contextmanager
def _errors_of_http(session: AgentSession) -> Iterator[None]:
    """Turn errors while a session answers a request into HTTPExceptions."""
    try:
        yield
    except HTTPException:
        raise
    except NoRoom as error:
        raise HTTPException(400, {"message": str(error), "code": "context_length_exceeded"}) from error
    except (ValidationError, UserError) as error:
        raise HTTPException(400, str(error)) from error
    except Exception as error:
        # An error of the engine ends the episode and is reported there. Any other is an error of the gateway.
        if error is not session.error:
            logger.exception("a request to the gateway failed")
        # Official clients would try again, which is of no use.
        raise HTTPException(500, described(error), {"x-should-retry": "false"}) from error


async def _complete(request: Request) -> Response:
    """End a session. The body is {"reward": number} or {"failed": text} or {"leave_out": true}."""
    ticket = request.state.ticket
    try:
        body = json.loads(await read_body(request.receive))
    except ValueError as error:
        raise HTTPException(400, f"the body must be JSON: {error}") from error
    if not isinstance(body, dict) or len(body.keys() & {"reward", "failed", "leave_out"}) != 1:
        raise HTTPException(400, "the body must be an object with one of reward, failed and leave_out")
    if not ticket.ended.done():
        ticket.ended.set_result(body)
    return JSONResponse({"id": ticket.id, "turns": ticket.session.trajectory.turns})


async def _as_error(request: Request, error: HTTPException) -> JSONResponse:
    """Return an error as the protocol of the request's path says it."""
    wire = MessagesRequest if request.url.path.endswith("/messages") else ChatRequest
    detail = error.detail if isinstance(error.detail, dict) else {"message": error.detail, "code": None}
    return JSONResponse(wire.error(error.status_code, **detail), error.status_code, error.headers)
