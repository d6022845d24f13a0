"""EngineClient sends requests to one engine. Each caller awaits the completion of its own request."""

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import ray

from grpo_megatron.cluster.polled_calls import PolledCalls
from grpo_megatron.cluster.processes import Process, fetched
from grpo_megatron.cluster.rounds import RoundId
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.sglang.kv_pressure import RequestLimit
from grpo_megatron.sglang.request import Completion, NewTokens, Request


@dataclass(frozen=True)
class EngineConnection:
    """Everything that a process needs to send requests to one engine. It can be sent to another process."""

    engine: ray.actor.ActorHandle
    """The SGLangEngine actor."""
    process: Process
    """Name and log of the engine, for error messages."""
    config: RolloutConfig
    """Limits of requests: rollout.max_concurrency and rollout.engine.request_timeout."""

    def client(self, round: RoundId, limit: int | None = None) -> "EngineClient":
        """Return a client for the requests of one round. The client must be used within one event loop.

        limit: number of requests in flight to begin with; None: rollout.max_concurrency.
        """
        return EngineClient(self, round, limit)


@cache
def _name_of_process(pid: int) -> str:
    """Return a name that no other process has, on any node. pid: id of this process."""
    return f"process {pid} {uuid.uuid4().hex[:8]}"


class EngineClient:
    """Sends a round's requests to one engine.

    limit: limits the requests in flight to rollout.max_concurrency, or to fewer if the engine's KV cache has
        no room for them
    """

    def __init__(self, connection: EngineConnection, round: RoundId, limit: int | None = None):
        # A group whose engine is lost stays with its rollout worker, so workers on several nodes may send
        # requests for one round to this engine. Each needs a round of its own there: an answer that both
        # poll for would reach only one of them.
        round = RoundId(f"{round.caller} of {_name_of_process(os.getpid())}", round.number)
        self._connection, self._round = connection, round
        self.limit = RequestLimit(connection.config.max_concurrency, limit)
        self._calls = PolledCalls(
            connection.process,
            "generate",
            lambda requests: connection.engine.submit.remote(round, requests),
            lambda seconds: connection.engine.poll.remote(round, seconds),
            connection.config.engine.request_timeout,
            self._timed_out,
        )

    def _timed_out(self, waiting: int) -> str:
        process, limit = self._connection.process, self._connection.config.engine.request_timeout
        return (
            f"{process.name} did not finish any of its {waiting} samples in progress within "
            f"rollout.engine.request_timeout={limit:.0f} s; its log is {process.log}"
        )

    async def generate(
        self, request: Request, listener: Callable[[NewTokens], None] | None = None
    ) -> Completion:
        """Send a request and return its completion.

        If as many requests of this client are in flight as `limit` allows, wait before sending. No two
        requests in flight may have the same key.

        listener: called with the newly sampled tokens, each time that the engine reports some before the
            response is complete. It may be None only if the engine sends no such reports
            (rollout.engine.log_every=0).

        Raises ProcessLost if the engine dies, and UserError if the engine finishes no request for
        rollout.engine.request_timeout seconds. If another request in flight fails, its error is raised here
        too. Raises RuntimeError after the end of the round.
        """
        async with self.limit:
            completion = await self._calls.call(request.key, request, listener)
            if completion.load:
                self.limit.observe(completion.load)
            return completion

    async def end(self) -> None:
        """End the round on the engine, with all its requests.

        The caller must have cancelled all tasks that await `generate`, because they would wait forever.

        Raises ProcessLost if the engine dies.
        """
        await self._calls.close()
        await fetched(self._connection.engine.end.remote(self._round), self._connection.process, "end")
