"""The HTTP application of the server, and its routes."""

import asyncio
import hmac
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from google.protobuf.message import DecodeError

from grpo_megatron.errors import UserError
from grpo_megatron.serve.answers import Answers, FailedRequest, Gone, RequestAnswer, Unknown
from grpo_megatron.serve.clients import Clients
from grpo_megatron.serve.protobuf import ForwardBackwardRequest
from grpo_megatron.serve.requests import ModelRequest, SampleRequest, explained
from grpo_megatron.serve.tenant import ServerJob, Tenant

# Maximum bytes of a request's body. The SDK divides training data into parts of about 5 MB.
_LONGEST_BODY = 64 << 20
# Seconds that a client waits for a pending answer in one request. The SDK gives up after 45.
_WAIT_SECONDS = 20.0
# Seconds between two looks for clients that are gone, and whether to stop.
_LOOK_SECONDS = 0.3
# What the SDK asks before all else: it sends every request in order, uncompressed, and over HTTP/1.1.
_CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "use_pyqwest_transport": False,
}
_STATUS = {Unknown: 404, Gone: 410, DecodeError: 422, UserError: 422, RequestValidationError: 422}


@dataclass
class ServerState:
    """The objects that the routes work with."""

    tenant: Tenant
    """Executes the requests, in another thread."""
    clients: Clients
    """The sessions of clients, and which of them has the model."""
    name: str
    """Name of the base model, by which clients ask for it."""
    lora_rank: int
    """Rank of the adapters that are trained. 0: all weights are trained."""
    longest: int
    """Maximum number of tokens of a prompt and its response."""
    answers: Answers = field(default_factory=Answers)
    """The answers to all requests."""

    @property
    def about_model(self) -> dict[str, Any]:
        return {"is_lora": self.lora_rank > 0, "lora_rank": self.lora_rank or None}

    def begin(self, session: str, number: int, asked: ModelRequest, run: Callable[[str], Any]) -> dict:
        """Give the model to a client, with run(id of the model) as its first job."""
        model = f"{session}:train:{number}"
        answer, is_new = self.answers.open(f"{model}:create", asked.model_dump_json().encode())
        if is_new:
            self.clients.admit(session, model, ServerJob(answer, lambda: run(model)))
        return {"request_id": answer.id, "model_id": model}

    def in_order(self, model: str, number: int, content: bytes, run: Callable[[], Any]) -> dict:
        """Add a request of a model. It is executed after those with smaller numbers."""
        self.clients.must_have(model)
        answer, is_new = self.answers.open(f"{model}:{number}", content)
        if is_new:
            self.clients.put(model, number, ServerJob(answer, run))
        return {"request_id": answer.id, "model_id": model}


def application(state: ServerState, key: str) -> FastAPI:
    """Return the server's application.

    key: the key that each request must have in its header X-API-Key.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.middleware("http")
    async def admit(request: Request, call_next) -> Response:
        if not hmac.compare_digest(request.headers.get("x-api-key", "").encode(), key.encode()):
            return JSONResponse({"detail": "the key is missing or wrong"}, 401)
        unknown = 0 if request.method in ("GET", "DELETE") else _LONGEST_BODY + 1
        if int(request.headers.get("content-length", unknown)) > _LONGEST_BODY:
            return JSONResponse({"detail": f"a body must say its length, up to {_LONGEST_BODY} bytes"}, 413)
        return await call_next(request)

    for kind in _STATUS:
        app.exception_handler(kind)(_as_answer)
    app.exception_handler(404)(_no_such_route)
    for routes in (_client_routes, _model_routes, _sampling_routes):
        app.include_router(routes(state), prefix="/api/v1")
    return app


async def serve_on(listener: socket.socket, state: ServerState, key: str, stop: threading.Event) -> None:
    """Serve HTTP requests until `stop` is set, and look for clients that are gone."""
    config = uvicorn.Config(application(state, key), log_level="warning", lifespan="off", access_log=False)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    while not stop.is_set() and not serving.done():
        await asyncio.sleep(_LOOK_SECONDS)
        state.clients.end_lost()
        state.answers.forget_old()
    server.should_exit = server.force_exit = True
    await serving


async def _as_answer(request: Request, error: Exception) -> JSONResponse:
    status = next(status for kind, status in _STATUS.items() if isinstance(error, kind))
    text = explained(error.errors()) if isinstance(error, RequestValidationError) else str(error)
    return JSONResponse({"detail": text}, status)


async def _no_such_route(request: Request, error: Exception) -> JSONResponse:
    asked = f"{request.method} {request.url.path}"
    return JSONResponse({"detail": f"this server does not support {asked}; see docs/serve.md"}, 404)


def _client_routes(state: ServerState) -> APIRouter:
    """Return the routes for the sessions of clients."""
    routes, clients = APIRouter(), state.clients

    @routes.get("/healthz")
    async def health() -> dict[str, Any]:
        return {"status": "ok"}

    @routes.get("/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        model = {"model_name": state.name, "trainable": True, "sampleable": True}
        return {"supported_models": [model | {"max_context_length": state.longest}]}

    @routes.post("/client/config")
    async def client_config() -> dict[str, Any]:
        return _CLIENT_CONFIG

    @routes.post("/client/dynamic_config")
    async def dynamic_config() -> dict[str, Any]:
        return {}

    @routes.post("/create_session")
    async def create_session(request: Request) -> dict[str, Any]:
        trained = f"LoRA adapters of rank {state.lora_rank}" if state.lora_rank else "all weights"
        note = f"this server trains {trained} of {state.name}, whatever LoRA rank a client asks for"
        session = clients.open(request.headers.get("x-idempotency-key"))
        return {"type": "create_session", "session_id": session, "info_message": note}

    @routes.post("/session_heartbeat")
    async def heartbeat(asked: ModelRequest) -> dict[str, Any]:
        if not clients.is_alive(asked.session_id or ""):
            raise Gone("the session has ended")
        return {"type": "session_heartbeat"}

    @routes.post("/sessions/{session}/finish", status_code=204)
    async def finish(session: str) -> None:
        clients.end(session, "the client has ended its session")

    @routes.post("/telemetry")
    async def telemetry(request: Request) -> dict[str, Any]:
        body = await request.json()
        if any(event.get("event") == "SESSION_END" for event in body["events"]):
            clients.may_end(body["session_id"])
        return {"status": "accepted"}

    return routes


def _model_routes(state: ServerState) -> APIRouter:
    """Return the routes for the model: training, saving and loading."""
    routes, tenant = APIRouter(), state.tenant

    @routes.post("/create_model")
    async def create_model(asked: ModelRequest) -> dict[str, Any]:
        asked.check_model(state.name)
        return state.begin(asked.session_id or "", asked.model_seq_id, asked, tenant.create)

    @routes.post("/load_weights")
    async def load_weights(asked: ModelRequest) -> dict[str, Any]:
        asked.check_model(state.name)

        def load(model: str) -> dict[str, Any]:
            return tenant.load(model, asked.path or "", asked.optimizer)

        if asked.session_id:
            return state.begin(asked.session_id, asked.model_seq_id, asked, load)
        content = asked.model_dump_json().encode()
        return state.in_order(asked.model_id, asked.seq_id, content, lambda: load(asked.model_id))

    @routes.post("/get_info")
    async def get_info(asked: ModelRequest) -> dict[str, Any]:
        state.clients.must_have(asked.model_id)
        about = state.about_model | {"model_id": asked.model_id, "model_name": state.name}
        return {"type": "get_info", "model_data": {"model_name": state.name}} | about

    @routes.post("/weights_info")
    async def weights_info() -> dict[str, Any]:
        return {"base_model": state.name} | state.about_model

    @routes.post("/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        raw = await request.body()
        asked = ForwardBackwardRequest.FromString(raw)
        return state.in_order(asked.model_id, asked.seq_id, raw, lambda: tenant.forward_backward(asked))

    def add(verb: str, run: Callable[[ModelRequest], dict[str, Any]]) -> None:
        @routes.post(f"/{verb}")
        async def ask(asked: ModelRequest) -> dict[str, Any]:
            content = asked.model_dump_json().encode()
            return state.in_order(asked.model_id, asked.seq_id, content, lambda: run(asked))

    add("optim_step", tenant.optim_step)
    add("save_weights", tenant.save)
    add("save_weights_for_sampler", tenant.publish)
    add("save_weights_external", tenant.save_external)

    @routes.delete("/training_runs/{model}/checkpoints/{kind}/{name}", status_code=204)
    async def delete(model: str, kind: str, name: str) -> None:
        job = ServerJob(RequestAnswer(), lambda: tenant.delete(f"tinker://{model}/{kind}/{name}"))
        tenant.submit(job)
        result = await asyncio.wrap_future(job.answer.future)
        if isinstance(result, FailedRequest):
            raise Unknown(result.message)

    return routes


def _sampling_routes(state: ServerState) -> APIRouter:
    """Return the routes for sampling, and the one that fetches answers."""
    routes, tenant = APIRouter(), state.tenant

    @routes.post("/create_sampling_session")
    async def create_sampling_session(asked: ModelRequest) -> dict[str, Any]:
        published = tenant.published if asked.model_path else {state.name: tenant.base_version}
        sampler = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        wanted = asked.model_path or asked.base_model
        if wanted not in published:
            raise Unknown(f"there are no weights {wanted} to sample from, but {', '.join(published)}")
        tenant.samplers[sampler] = published[wanted]
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    @routes.get("/samplers/{sampler}")
    async def find_sampler(sampler: str) -> dict[str, Any]:
        tenant.must_have(sampler)
        return {"sampler_id": sampler, "base_model": state.name}

    @routes.post("/asample")
    async def sample(asked: SampleRequest) -> dict[str, Any]:
        asked.check()
        sampler = asked.sampling_session_id
        version = tenant.must_have(sampler)
        state.clients.is_alive(sampler.partition(":")[0])
        content = asked.model_dump_json().encode()
        answer, is_new = state.answers.open(f"{sampler}:{asked.seq_id}", content)
        if is_new:
            tenant.submit(ServerJob(answer, sample=asked, version=version))
        names = [f"{answer.id}:{index}" for index in range(asked.num_samples)]
        return {"request_id": answer.id, "sample_sequence_ids": names}

    @routes.post("/retrieve_future")
    async def retrieve(request: Request) -> Response:
        """Wait for an answer, and return it. The SDK asks again after the status 408."""
        answer = state.answers.find((await request.json())["request_id"])
        try:
            waiting = asyncio.shield(asyncio.wrap_future(answer.future))
            result = await asyncio.wait_for(waiting, _WAIT_SECONDS)
        except TimeoutError:
            queue = "paused_capacity" if answer.waits_for else "active"
            return JSONResponse({"queue_state": queue, "queue_state_reason": answer.waits_for or None}, 408)
        state.answers.mark_fetched(answer)
        if isinstance(result, FailedRequest):
            category = "user" if result.by_user else "server"
            return JSONResponse({"error": result.message, "category": category})
        if isinstance(result, bytes):
            return Response(result, media_type="application/x-protobuf")
        return JSONResponse(result)

    return routes
