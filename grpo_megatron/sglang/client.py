"""EngineClient sends requests to one engine. Each caller awaits the completion of its own request."""

import asyncio
import contextlib

import ray

from grpo_megatron.cluster.processes import Process, fetch
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import UserError
from grpo_megatron.sglang.request import Completion, Request

# Maximum seconds that one poll waits in the engine. It only determines how soon a deadlock is noticed.
_POLL_SECONDS = 5.0


class EngineClient:
    """A client that sends requests to one engine, with at most rollout.max_concurrency requests in flight.

    The client sends requests in groups and polls the engine for finished ones, so that one Ray call carries
    many samples. EnginePool.clients creates the clients.

    end_ids: ids of the tokens that end a response.
    """

    def __init__(
        self,
        engine: ray.actor.ActorHandle,
        process: Process,
        config: RolloutConfig,
        client_id: int,
        end_ids: frozenset[int],
    ):
        """Connect to a running engine.

        engine: the SGLangEngine actor.
        process: name and log of the engine, for error messages.
        client_id: id of this client. It must be higher than the id of every earlier client of the engine,
            because `abort` ends the requests of all clients up to this one.
        end_ids: ids of the tokens that end a response.
        """
        self._engine, self._process, self._client_id = engine, process, client_id
        self.end_ids = end_ids
        self._timeout = config.engine.request_timeout
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._answers: dict[tuple[int, int], asyncio.Future] = {}
        self._unsent: list[Request] = []
        self._poller: asyncio.Task | None = None

    async def generate(self, request: Request) -> Completion:
        """Send a request and return its completion.

        If rollout.max_concurrency requests of this client are in flight, wait before sending. No two requests
        in flight may have the same key.
        Raises UserError if the engine dies. Raises UserError also if the engine finishes no request for
        rollout.engine.request_timeout seconds.
        """
        async with self._slots:
            loop = asyncio.get_running_loop()
            answer = self._answers[request.key] = loop.create_future()
            self._unsent.append(request)
            if len(self._unsent) == 1:
                loop.call_soon(self._send)  # it also sends the requests that arrive until then
            return await answer

    async def abort(self) -> None:
        """End all requests in flight on the engine. Callers of `generate` must have been cancelled before.

        Only one client of an engine has requests in flight at a time, so no other client is affected.
        Raises UserError if the engine dies.
        """
        self._answers.clear()
        self._unsent = []
        if self._poller:
            self._poller.cancel()
        reference = self._engine.abort.remote(self._client_id)
        with contextlib.suppress(Exception):
            await reference  # fetch raises the error
        fetch(reference, self._process, "abort")

    def _send(self) -> None:
        # The result of this call is not awaited: if the engine fails, the poll reports it.
        self._engine.submit.remote(self._client_id, self._unsent)
        self._unsent = []
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        try:
            await self._answer_all()
        except Exception as error:  # passed on to every waiting caller
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(error)

    async def _answer_all(self) -> None:
        clock = asyncio.get_running_loop().time
        last_progress = clock()
        while self._answers:
            reference = self._engine.poll.remote(self._client_id, _POLL_SECONDS)
            with contextlib.suppress(Exception):
                await reference  # fetch raises the error
            completions: list[Completion] = fetch(reference, self._process, "generate")
            for completion in completions:
                self._answers.pop(completion.key).set_result(completion)
            if completions:
                last_progress = clock()
            elif clock() - last_progress > self._timeout:
                raise UserError(
                    f"{self._process.name} finished none of its {len(self._answers)} samples in progress for "
                    f"rollout.engine.request_timeout={self._timeout:.0f} s; its log is {self._process.log}"
                )
