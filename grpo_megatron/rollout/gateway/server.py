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
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from grpo_megatron.errors import UserError, described
from grpo_megatron.rollout.gateway.anthropic import MessagesRequest
from grpo_megatron.rollout.gateway.connection import read_body, while_connected
from grpo_megatron.rollout.gateway.openai import ChatRequest
from grpo_megatron.rollout.gateway.session import AgentSession, NoRoom
from grpo_megatron.rollout.gateway.shared import SharedSessions
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
    shared: sessions of a client that has one key for all of them
    """

    def __init__(self, model: str = "policy"):
        """Create a gateway without sessions, which does not listen yet.

        model: name of the model, as clients see it.
        """
        self.model, self.shared = model, SharedSessions()
        self.port = 0
        self._tickets: dict[str, Ticket] = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task | None = None

    async def start(self) -> None:
        """Listen on a free port of loopback, in the running event loop."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self.shared.before(self),
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
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

    @property
    def shared_url(self) -> str:
        """Base URL for the client of the shared sessions."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. This makes the gateway an ASGI application.

        A request without a session's key gets the status 401, whatever its path. If the path names a session,
        the key must be that of this session.
        """
        request = Request(scope, receive)
        path, session_id = scope["path"], None
        if path.startswith("/sessions/"):
            session_id, _, path = path.removeprefix("/sessions/").partition("/")
            path = f"/{path}"
        ticket = self._tickets.get(_key(request))
        try:
            if ticket is None or session_id not in (None, ticket.id):
                with contextlib.suppress(HTTPException):
                    await read_body(receive, 0)
                raise HTTPException(401, "the key is missing or not that of a session")
            response = await self._answer(path, ticket, request)
        except HTTPException as error:
            response = _as_response(path, error)
        await response(scope, receive, send)

    async def _answer(self, path: str, ticket: Ticket, request: Request) -> Response:
        """Return the answer to a request with a valid key.

        path: the path without the session.
        """
        method = "POST"
        if path in _WIRES:
            answering = partial(_turn, _WIRES[path], ticket.session, request, self.model)
        elif path == "/complete":
            answering = partial(_complete, ticket, request)
        elif path in ("/v1/models", "/v1/v1/models"):
            method, answering = "GET", self._models
        else:
            raise HTTPException(404, "there is nothing at this path")
        if request.method != method:
            raise HTTPException(405, f"the method must be {method}")
        return await answering()

    async def _models(self) -> Response:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "grpo_megatron"}
        return JSONResponse({"object": "list", "data": [model]})


class _Server(uvicorn.Server):
    """A server that leaves the handling of signals to its process."""

    capture_signals = contextlib.nullcontext


def _key(request: Request) -> str:
    """Return the key of a request, which is empty if there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def _turn(wire: type[WireRequest], session: AgentSession, request: Request, model: str) -> Response:
    """Answer a request for a turn of the model, in the form that the client wants."""
    with _errors_of_http(session):
        asked = wire.model_validate_json(await read_body(request.receive))
        asked.check()
        given = request.headers.get("idempotency-key")
        key = f"{wire.__name__} {given}" if given else asked.key
        answer = await while_connected(request.receive, asked.answer(session, key))
    body = asked.body(answer, model)
    if not asked.stream:
        return JSONResponse(body)
    return Response("".join(asked.events(body)), media_type="text/event-stream")


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


async def _complete(ticket: Ticket, request: Request) -> Response:
    """End a session. The body is {"reward": number} or {"failed": text} or {"leave_out": true}."""
    try:
        body = json.loads(await read_body(request.receive))
    except ValueError as error:
        raise HTTPException(400, f"the body must be JSON: {error}") from error
    if not isinstance(body, dict) or len(body.keys() & {"reward", "failed", "leave_out"}) != 1:
        raise HTTPException(400, "the body must be an object with one of reward, failed and leave_out")
    if not ticket.ended.done():
        ticket.ended.set_result(body)
    return JSONResponse({"id": ticket.id, "turns": ticket.session.trajectory.turns})


def _as_response(path: str, error: HTTPException) -> JSONResponse:
    """Return an error as the protocol of the request's path says it."""
    wire = MessagesRequest if path.endswith("/messages") else ChatRequest
    detail = error.detail if isinstance(error.detail, dict) else {"message": error.detail, "code": None}
    return JSONResponse(wire.error(error.status_code, **detail), error.status_code, error.headers)
