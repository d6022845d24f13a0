"""EngineClient sends requests to one engine. Each caller awaits the completion of its own request."""

import asyncio
from dataclasses import dataclass

import ray

from grpo_megatron.cluster.polled_calls import PolledCalls
from grpo_megatron.cluster.processes import Process, fetched
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.sglang.request import Completion, Request


@dataclass(frozen=True)
class EngineConnection:
    """All that a process needs to send requests to one engine. It can be sent to another process."""

    engine: ray.actor.ActorHandle
    """The SGLangEngine actor."""
    process: Process
    """Name and log of the engine, for error messages."""
    config: RolloutConfig
    """Limits of requests: rollout.max_concurrency and rollout.engine.request_timeout."""

    def client(self, client_id: int) -> "EngineClient":
        """Return a client, which must be used within one event loop.

        client_id: id of the client. It must be higher than the id of every earlier client of the engine,
            because `abort` ends the requests of all clients up to this one.
        """
        return EngineClient(self, client_id)


class EngineClient:
    """A client that sends requests to one engine, with at most rollout.max_concurrency requests in flight."""

    def __init__(self, connection: EngineConnection, client_id: int):
        self._engine, self._process, self._client_id = connection.engine, connection.process, client_id
        self._slots = asyncio.Semaphore(connection.config.max_concurrency)
        self._calls = PolledCalls(
            connection.process,
            "generate",
            lambda requests: self._engine.submit.remote(client_id, requests),
            lambda seconds: self._engine.poll.remote(client_id, seconds),
            connection.config.engine.request_timeout,
        )

    async def generate(self, request: Request) -> Completion:
        """Send a request and return its completion.

        If rollout.max_concurrency requests of this client are in flight, wait before sending. No two requests
        in flight may have the same key.
        Raises UserError if the engine dies. Raises UserError also if the engine finishes no request for
        rollout.engine.request_timeout seconds.
        """
        async with self._slots:
            return await self._calls.call(request.key, request)

    async def abort(self) -> None:
        """End all requests in flight on the engine. Callers of `generate` must have been cancelled before.

        Only one client of an engine has requests in flight at a time, so no other client is affected.
        Raises UserError if the engine dies.
        """
        self._calls.forget()
        await fetched(self._engine.abort.remote(self._client_id), self._process, "abort")
