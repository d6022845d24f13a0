"""The gateway's server: sessions under secret keys, and the routes of the protocols that it speaks."""

import asyncio
import contextlib
import json
import logging
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from grpo_megatron.errors import UserError, described
from grpo_megatron.files import json_text
from grpo_megatron.rewards.values import NoReward, read_reward
from grpo_megatron.rollout.gateway.anthropic import CountRequest, MessagesRequest
from grpo_megatron.rollout.gateway.connection import read_body, while_connected
from grpo_megatron.rollout.gateway.openai import ChatRequest
from grpo_megatron.rollout.gateway.session import AgentSession, RequestRefused
from grpo_megatron.rollout.gateway.shared import SharedSessions
from grpo_megatron.rollout.gateway.vllm import GenerateRequest
from grpo_megatron.rollout.gateway.wire import WireRequest

logger = logging.getLogger(__name__)

_WIRES: dict[str, type[WireRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/inference/v1/generate": GenerateRequest,
}
_COMPLETE, _MODELS = ("/complete", "/v1/complete"), "/v1/models"
# Header that names the session of a request with the key of the shared sessions. verifiers sends it.
_NAME_HEADER = "x-session-id"
# Seconds that an idle connection stays open. Clients keep theirs for 5 s, and must be the first to close.
_KEEP_SECONDS = 75


@dataclass
class Ticket:
    """A session that the gateway serves: its id and key, which the agent needs, and its end."""

    session: AgentSession
    """The session."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    """Id of the session, which is in its URL."""
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """Secret key of the session."""
    ended: "asyncio.Future[dict[str, Any]]" = field(default_factory=asyncio.Future)
    """Body of the agent's request to end the session, such as {"reward": 1.0}."""
    asked: dict[str, str] = field(default_factory=dict)
    """{header Idempotency-Key: key of the request that had it}"""


class Gateway:
    """An HTTP server through which agents make requests to their sessions.

    model: name of the model, as clients see it
    port: the port that it listens on, after `start`
    shared: sessions of a client that has one key for all of them
    """

    def __init__(self, model: str = "policy", address: str = "127.0.0.1"):
        """Create a gateway without sessions, which does not listen yet.

        model: name of the model, as clients see it.
        address: address of this machine to listen on, by which the clients reach it.
        """
        self.model, self.shared, self._address = model, SharedSessions(), address
        self.port = 0
        self._tickets: dict[str, Ticket] = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task | None = None

    async def start(self) -> None:
        """Listen on a free port, in the running event loop.

        Raises UserError if this machine does not have the address.
        """
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        try:
            listener = socket.create_server((self._address, 0), family=family)
        except OSError as error:
            raise UserError(
                f"the endpoint of agents cannot listen on {self._address} ({error}); set "
                "rollout.agent.address to an address that each machine with engines has, or to node"
            ) from error
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self,
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
            await asyncio.wait([self._serving], timeout=0.01)
            if self._serving.done():
                self._serving.result()  # raises what went wrong

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
        return f"{self._url}/sessions/{ticket.id}/v1"

    @property
    def shared_url(self) -> str:
        """Base URL for the client of the shared sessions."""
        return f"{self._url}/v1"

    @property
    def _url(self) -> str:
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"http://{host}:{self.port}"

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
        ticket = await self._ticket(request)
        try:
            if ticket is None or session_id not in (None, ticket.id):
                with contextlib.suppress(HTTPException):
                    await read_body(receive, 0)
                raise HTTPException(401, "the key is missing or not that of a session")
            response = await self._answer(path, ticket, request)
        except HTTPException as error:
            response = _as_response(path, error)
        await response(scope, receive, send)

    async def _ticket(self, request: Request) -> Ticket | None:
        """Return the ticket of the session whose key a request has, or None if it has no such key."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        keys = [bearer if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", "")]
        name = request.headers.get(_NAME_HEADER)
        if name and any(secrets.compare_digest(key.encode(), self.shared.key.encode()) for key in keys):
            keys = [await self.shared.find(name)]
        return next((self._tickets[key] for key in keys if key in self._tickets), None)

    async def _answer(self, path: str, ticket: Ticket, request: Request) -> Response:
        """Return the answer to a request with a valid key.

        path: the path without the session.
        """
        # Anthropic's client adds /v1 to its base URL, which OpenAI's client does not. One URL serves both.
        path, method = path.replace("/v1/v1/", "/v1/", 1), "POST"
        if path in _WIRES:
            answering = partial(_turn, _WIRES[path], ticket, request, self.model)
        elif path in _COMPLETE:
            answering = partial(_complete, ticket, request)
        elif path == _MODELS:
            method, answering = "GET", self._models
        else:
            known = ", ".join([*_WIRES, _MODELS, _COMPLETE[0]])
            raise HTTPException(404, f"there is nothing at this path; the paths are {known}")
        if request.method != method:
            raise HTTPException(405, f"the method must be {method}")
        return await answering()

    async def _models(self) -> Response:
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "grpo_megatron"}
        return _json({"object": "list", "data": [model]})


class _Server(uvicorn.Server):
    """A server that leaves the handling of signals to its process."""

    capture_signals = contextlib.nullcontext


async def _turn(wire: type[WireRequest], ticket: Ticket, request: Request, model: str) -> Response:
    """Answer a request for a turn of the model, in the form that the client wants."""
    with _errors_of_http(ticket.session):
        asked = wire.model_validate_json(await read_body(request.receive))
        asked.check(ticket.session)
        key = asked.key
        if given := request.headers.get("idempotency-key"):
            if ticket.asked.setdefault(given, key) != key:
                raise HTTPException(422, "this Idempotency-Key belongs to another request; use a new one")
            key = f"{given} {key}"
        answer = await while_connected(request.receive, asked.answer(ticket.session, key))
        body = asked.body(answer, model)
        if asked.stream:
            return Response("".join(asked.events(body)), media_type="text/event-stream")
        return _json(body)


def _json(body: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json_text(body), status, headers, "application/json")


@contextlib.contextmanager
def _errors_of_http(session: AgentSession) -> Iterator[None]:
    """Turn errors while a session answers a request into HTTPExceptions."""
    try:
        yield
    except HTTPException:
        raise
    except RequestRefused as error:
        raise HTTPException(error.status, {"message": str(error), "code": error.code}) from error
    except ValidationError as error:
        raise HTTPException(400, _complaint(error)) from error
    except UserError as error:
        raise HTTPException(400, str(error)) from error
    except Exception as error:
        # An error of the engine ends the episode and is reported there. Any other is an error of the gateway.
        if error is not session.error:
            logger.exception("a request to the gateway failed")
        # Official clients would try again, which is of no use.
        raise HTTPException(500, described(error), {"x-should-retry": "false"}) from error


def _complaint(error: ValidationError) -> str:
    """Return what is wrong with the body of a request, without what the client has sent."""
    found = error.errors(include_url=False, include_input=False)
    places = (".".join(str(part) for part in each["loc"] if "[" not in str(part)) for each in found)
    return "; ".join(
        f"{place or 'the body'}: {each['msg']}" for place, each in zip(places, found, strict=True)
    )


async def _complete(ticket: Ticket, request: Request) -> Response:
    """End a session. The body is {"reward": number} or {"failed": text} or {"leave_out": true}.

    Beside the reward, it may have further numbers for the logs.
    """
    try:
        body = json.loads(await read_body(request.receive))
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body must be JSON: {error}") from error
    if not isinstance(body, dict) or len(body.keys() & {"reward", "failed", "leave_out"}) != 1:
        raise HTTPException(400, "the body must be an object with one of reward, failed and leave_out")
    if body.get("leave_out", True) is not True:
        raise HTTPException(400, "leave_out must be true")
    if "reward" in body:
        try:
            read_reward(body, from_json=True)
        except NoReward as error:
            raise HTTPException(400, f"reward: {error}") from error
    if ticket.ended.done() and ticket.ended.result() != body:
        raise HTTPException(409, f"the session has already ended with {ticket.ended.result()}")
    if not ticket.ended.done():
        ticket.ended.set_result(body)
        await ticket.session.close()
    return _json({"id": ticket.id, "turns": ticket.session.trajectory.turns})


def _as_response(path: str, error: HTTPException) -> Response:
    """Return an error as the protocol of the request's path says it."""
    wire = MessagesRequest if "/messages" in path else ChatRequest
    detail = error.detail if isinstance(error.detail, dict) else {"message": error.detail, "code": None}
    return _json(wire.error(error.status_code, **detail), error.status_code, error.headers)
