"""The HTTP routes of the server: who may use it, whose turn it is, and where answers are fetched."""

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ValidationError

from grpo_megatron.errors import UserError
from grpo_megatron.serve import requests
from grpo_megatron.serve.answers import Answer, Answers, Failed, Gone
from grpo_megatron.serve.clients import Clients
from grpo_megatron.serve.protobuf import ForwardBackwardRequest
from grpo_megatron.serve.tenant import Job, Tenant

_API = "/api/v1"
# Maximum bytes of a request's body. The SDK divides training data into parts of about 5 MB.
_LONGEST_BODY = 64 << 20
# Seconds that a client waits for a pending answer in one request. The SDK gives up after 45.
_WAIT_SECONDS = 20.0
# Seconds between two looks for clients that are gone.
_LOOK_SECONDS = 1.0
# Answers to the SDK about what the server can do: everything in order, and uncompressed.
_CLIENT_CONFIG = {
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "use_pyqwest_transport": False,
    "custom_loss_server_side": False,
}

Body = TypeVar("Body", bound=BaseModel)


class TinkerServer:
    """The server's application, whose requests a Tenant executes in another thread.

    clients: the sessions of clients, and which of them has the model
    app: the FastAPI application
    """

    def __init__(self, tenant: Tenant, model: str, key: str, lora_rank: int, lost_after: float = 60.0):
        """Create the application.

        model: name of the base model, by which clients ask for it.
        key: the key that each request must have in its header X-API-Key.
        lora_rank: rank of the adapters that are trained. 0: all weights are trained.
        lost_after: seconds without a sign of life after which a client counts as lost.
        """
        self._tenant, self._model, self._key, self._lora_rank = tenant, model, key, lora_rank
        self._answers = Answers()
        self.clients = Clients(tenant, lost_after)
        self.app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=self._looking)
        self.app.middleware("http")(self._with_key)
        self.app.exception_handler(UserError)(_refused)
        self.app.exception_handler(Gone)(_gone)
        self._add_routes()

    def _add_routes(self) -> None:
        for path, function in {
            "/client/config": self._client_config,
            "/client/dynamic_config": self._dynamic_config,
            "/create_session": self._create_session,
            "/session_heartbeat": self._heartbeat,
            "/sessions/{session}/finish": self._finish,
            "/telemetry": self._telemetry,
            "/create_model": self._create_model,
            "/load_weights": self._load_weights,
            "/get_info": self._get_info,
            "/forward_backward": self._forward_backward,
            "/optim_step": self._optim_step,
            "/save_weights": self._save_weights,
            "/save_weights_for_sampler": self._save_for_sampler,
            "/create_sampling_session": self._create_sampler,
            "/asample": self._sample,
            "/retrieve_future": self._retrieve,
            "/weights_info": self._weights_info,
        }.items():
            self.app.post(f"{_API}{path}")(function)
        self.app.get(f"{_API}/healthz")(self._health)
        self.app.get(f"{_API}/get_server_capabilities")(self._capabilities)
        self.app.get(f"{_API}/samplers/{{sampler}}")(self._sampler)
        self.app.delete(f"{_API}/training_runs/{{model}}/checkpoints/{{kind}}/{{name}}")(self._delete)

    @asynccontextmanager
    async def _looking(self, app: FastAPI) -> AsyncIterator[None]:
        """Look for lost clients as long as the server runs."""

        async def look() -> None:
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                self.clients.end_lost()
                self._answers.forget_old()

        task = asyncio.create_task(look())
        yield
        task.cancel()

    async def _with_key(self, request: Request, call_next) -> Response:
        given = request.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), self._key.encode()):
            return JSONResponse({"detail": "the key is missing or wrong"}, 401)
        return await call_next(request)

    # --- sessions of clients

    async def _health(self) -> dict[str, Any]:
        return {"status": "ok"}

    async def _client_config(self) -> dict[str, Any]:
        return _CLIENT_CONFIG

    async def _dynamic_config(self) -> dict[str, Any]:
        return {}

    async def _capabilities(self) -> dict[str, Any]:
        model = {"model_name": self._model, "trainable": True, "sampleable": True}
        return {"supported_models": [model | {"max_context_length": self._tenant.longest}]}

    async def _create_session(self, request: Request) -> dict[str, Any]:
        session = self.clients.open(request.headers.get("x-idempotency-key"))
        trained = f"LoRA adapters of rank {self._lora_rank}" if self._lora_rank else "all weights"
        note = f"this server trains {trained} of {self._model}, whatever LoRA rank a client asks for"
        return {"type": "create_session", "session_id": session, "info_message": note}

    async def _heartbeat(self, request: Request) -> dict[str, Any]:
        session = (await request.json()).get("session_id", "")
        if not self.clients.is_alive(session):
            raise HTTPException(410, "the session has ended")
        return {"type": "session_heartbeat"}

    async def _finish(self, session: str) -> Response:
        self.clients.end(session, "the client has ended its session")
        return Response(status_code=204)

    async def _telemetry(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        if any(event.get("event") == "SESSION_END" for event in body.get("events", ())):
            self.clients.end(body.get("session_id", ""), "the client has ended its session")
        return {"status": "accepted"}

    # --- the model

    async def _create_model(self, request: Request) -> dict[str, Any]:
        raw = await _body(request)
        asked = _parsed(requests.CreateModel, raw)
        model = f"{asked.session_id}:train:{asked.model_seq_id}"
        answer, is_new = self._answers.open(f"{model}:create", raw)
        if is_new:
            kind = (asked.optimizer_config or {}).get("type", "adamw")
            if asked.base_model != self._model:
                answer.finish(Failed(f"this server has the model {self._model}, but not {asked.base_model}"))
            elif kind != "adamw":
                answer.finish(Failed(f"the optimizer {kind} is not supported; choose AdamW"))
            else:
                job = Job(answer, lambda: self._tenant.create(model))
                self.clients.admit(asked.session_id, model, job)
        return _future(answer, model)

    async def _load_weights(self, request: Request) -> dict[str, Any]:
        raw = await _body(request)
        asked = _parsed(requests.LoadWeights, raw)
        if asked.session_id is None:
            model = asked.model_id or ""
            return self._in_order(
                model, asked.seq_id, raw, lambda: self._tenant.load(model, asked.path, asked.optimizer)
            )
        model = f"{asked.session_id}:train:{asked.model_seq_id}"
        answer, is_new = self._answers.open(f"{model}:create", raw)
        if is_new:
            job = Job(answer, lambda: self._tenant.load(model, asked.path, asked.optimizer))
            self.clients.admit(asked.session_id, model, job)
        return _future(answer, model)

    async def _get_info(self, request: Request) -> dict[str, Any]:
        model = (await request.json()).get("model_id", "")
        self.clients.must_have(model)
        return {
            "type": "get_info",
            "model_id": model,
            "model_name": self._model,
            "model_data": {"model_name": self._model},
            "is_lora": self._lora_rank > 0,
            "lora_rank": self._lora_rank or None,
        }

    async def _weights_info(self) -> dict[str, Any]:
        return {
            "base_model": self._model,
            "is_lora": self._lora_rank > 0,
            "lora_rank": self._lora_rank or None,
        }

    async def _delete(self, model: str, kind: str, name: str) -> Response:
        """Delete a saved state, after the requests before."""
        path = f"tinker://{model}/{kind}/{name}"
        answer = Answer("", b"")
        self._tenant.submit(Job(answer, lambda: self._tenant.delete(path)))
        result = await asyncio.wrap_future(answer.future)
        if isinstance(result, Failed):
            raise HTTPException(404, result.message)
        return Response(status_code=204)

    def _in_order(self, model: str, number: int | None, raw: bytes, run) -> dict[str, Any]:
        """Add a request of a model. It is executed after those with smaller numbers.

        Raises HTTPException if the client does not have the model.
        """
        if number is None:
            raise HTTPException(422, "seq_id is missing")
        line = self.clients.must_have(model)
        answer, is_new = self._answers.open(f"{model}:{number}", raw)
        if is_new:
            for job in line.put(number, Job(answer, run)):
                self._tenant.submit(job)
        return _future(answer, model)

    async def _forward_backward(self, request: Request) -> dict[str, Any]:
        raw = await _body(request)
        try:
            asked = ForwardBackwardRequest.FromString(raw)
        except DecodeError as error:
            raise HTTPException(422, f"the body must be a ForwardBackwardRequest: {error}") from error
        return self._in_order(asked.model_id, asked.seq_id, raw, lambda: self._tenant.forward_backward(asked))

    async def _optim_step(self, request: Request) -> dict[str, Any]:
        raw = await _body(request)
        asked = _parsed(requests.OptimStep, raw)
        return self._in_order(
            asked.model_id, asked.seq_id, raw, lambda: self._tenant.optim_step(asked.adam_params)
        )

    async def _save_weights(self, request: Request) -> dict[str, Any]:
        raw = await _body(request)
        asked = _parsed(requests.SaveWeights, raw)
        return self._in_order(
            asked.model_id,
            asked.seq_id,
            raw,
            lambda: self._tenant.save(asked.model_id, asked.path, asked.overwrite),
        )

    # --- sampling

    async def _save_for_sampler(self, request: Request) -> dict[str, Any]:
        raw = await _body(request)
        asked = _parsed(requests.SaveForSampler, raw)
        session = asked.model_id.partition(":")[0]
        sampler = f"{session}:sample:{asked.sampling_session_seq_id}"
        return self._in_order(
            asked.model_id,
            asked.seq_id,
            raw,
            lambda: self._tenant.publish(asked.model_id, asked.path, sampler, asked.kind == "inflight"),
        )

    async def _create_sampler(self, request: Request) -> dict[str, Any]:
        asked = _parsed(requests.CreateSampler, await _body(request))
        if asked.model_path is not None:
            version = self._tenant.published.get(asked.model_path)
            if version is None:
                raise HTTPException(400, f"no weights were published as {asked.model_path}")
        elif asked.base_model == self._model:
            version = self._tenant.base_version
        else:
            raise HTTPException(400, f"this server has the model {self._model}, not {asked.base_model}")
        sampler = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        self._tenant.samplers[sampler] = version
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    async def _sampler(self, sampler: str) -> dict[str, Any]:
        if sampler not in self._tenant.samplers:
            raise HTTPException(404, f"there is no sampling session {sampler}")
        return {"sampler_id": sampler, "base_model": self._model}

    async def _sample(self, request: Request) -> dict[str, Any]:
        raw = await _body(request)
        asked = _parsed(requests.SampleRequest, raw)
        asked.check()
        sampler = asked.sampling_session_id
        if sampler not in self._tenant.samplers:
            raise HTTPException(404, f"there is no sampling session {sampler}")
        self.clients.is_alive(sampler.partition(":")[0])
        answer, is_new = self._answers.open(f"{sampler}:{asked.seq_id}", raw)
        if is_new:
            self._tenant.submit(Job(answer, sample=asked))
        names = [f"{answer.id}:{index}" for index in range(asked.num_samples)]
        return _future(answer) | {"sample_sequence_ids": names}

    # --- answers

    async def _retrieve(self, request: Request) -> Response:
        """Wait for an answer, and return it. The SDK asks again after the status 408."""
        asked = _parsed(requests.Retrieve, await _body(request))
        answer = self._answers.find(asked.request_id)
        if answer is None:
            raise HTTPException(404, f"there was no request {asked.request_id}")
        try:
            waiting = asyncio.shield(asyncio.wrap_future(answer.future))
            result = await asyncio.wait_for(waiting, _WAIT_SECONDS)
        except TimeoutError:
            state = "paused_capacity" if answer.waits_for else "active"
            reason = answer.waits_for or None
            return JSONResponse({"queue_state": state, "queue_state_reason": reason}, 408)
        self._answers.mark_fetched(answer)
        if isinstance(result, Failed):
            category = "user" if result.by_user else "server"
            return JSONResponse({"error": result.message, "category": category})
        if isinstance(result, bytes):
            return Response(result, media_type="application/x-protobuf")
        return JSONResponse(result)


def _future(answer: Answer, model: str | None = None) -> dict[str, Any]:
    return {"request_id": answer.id, "model_id": model}


def _parsed(kind: type[Body], raw: bytes) -> Body:
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise HTTPException(422, str(error)) from error


async def _body(request: Request) -> bytes:
    """Read the body of a request. Raises HTTPException if it is too long."""
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > _LONGEST_BODY:
            raise HTTPException(413, f"the body of a request may have {_LONGEST_BODY >> 20} MiB")
    return b"".join(parts)


async def _refused(request: Request, error: UserError) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 422)


async def _gone(request: Request, error: Gone) -> JSONResponse:
    return JSONResponse({"detail": f"the answer to {error} was fetched before and is not kept"}, 410)
