"""The wire of verifiers' environment server (release 0.4): ZMQ frames, whose contents are packed by msgpack.

A request is [id, method, content]. While an episode is played, the server sends [id, b"delta", content] for
each change of a trace, and at last [id, b"reply", content]. A trace is what one agent has done.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from grpo_megatron.errors import UserError, shortened

logger = logging.getLogger(__name__)


class EpisodeFailed(UserError):
    """The environment server could not play an episode to its end."""


@dataclass
class AgentTrace:
    """One agent's part in an episode: its state, and what it has got."""

    id: str
    """Id of the trace. It is also the header `X-Session-ID` of all requests that the agent makes."""
    values: dict[str, Any] = field(default_factory=dict)
    """Last known values of its fields, such as `agent`, `rewards`, `metrics` and `ok`."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    """Its errors, each with `type` and `message`."""
    counts: dict[str, int] = field(default_factory=lambda: {"nodes": 0, "calls": 0})
    """Numbers of messages and of requests to the model, to notice changes that were lost."""


# Called with the first change of a trace. Errors that it raises fail the episode.
Opened = Callable[[AgentTrace], None]


class _Played:
    """An episode in progress.

    traces: {id: trace}
    reply: the server's reply, or the error
    opened: called when a trace begins
    """

    def __init__(self, opened: Opened):
        self.traces: dict[str, AgentTrace] = {}
        self.reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._opened = opened

    def apply(self, delta: dict[str, Any]) -> None:
        id = delta["trace"]
        if delta.get("discard"):
            raise EpisodeFailed("verifiers has played an agent again; its retries must be 0")
        is_new = id not in self.traces
        trace = self.traces.setdefault(id, AgentTrace(id))
        trace.values |= delta.get("set") or {}
        trace.errors += delta.get("errors") or []
        for name in trace.counts:
            trace.counts[name] += len(delta.get(name) or ())
        if is_new:
            self._opened(trace)

    def fail(self, error: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)


class Wire:
    """A connection to an environment server. It plays many episodes at the same time."""

    def __init__(self, address: str):
        """Connect to the server. Must be called in the event loop that plays the episodes."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self._socket.setsockopt(option, value)
        self._socket.connect(address)
        self._playing: dict[bytes, _Played] = {}
        self._lost: Exception | None = None
        self._receiver = asyncio.create_task(self._receive())

    async def play(
        self, task: dict[str, Any], endpoint: dict[str, Any], model: str, opened: Opened
    ) -> list[AgentTrace]:
        """Play one episode, and return its traces. If this call is cancelled, the episode ends.

        task: data of the task, as program.py lists them.
        endpoint: verifiers' configuration of the client that asks the model.
        model: name of the model in requests.
        opened: called when a trace begins, before its agent makes a request.

        Raises EpisodeFailed, and the error of `fail`.
        """
        if self._lost:
            raise self._lost
        id, played = uuid.uuid4().hex.encode(), _Played(opened)
        self._playing[id] = played
        content = {"task_data": task, "client": endpoint, "model": model, "sampling": {}}
        try:
            await self._send(id, b"run", content)
            reply = await played.reply
        except (asyncio.CancelledError, UserError):
            with contextlib.suppress(zmq.ZMQError):
                await self._send(uuid.uuid4().hex.encode(), b"cancel", {"request_id": id.decode()})
            raise
        finally:
            del self._playing[id]
        return _whole(reply, played.traces)

    async def _send(self, id: bytes, method: bytes, content: dict[str, Any]) -> None:
        await self._socket.send_multipart([id, method, msgpack.packb(content)])

    async def _receive(self) -> None:
        try:
            while True:
                self._take(*await self._socket.recv_multipart())
        finally:
            # Here, because a context that the garbage collector finds waits for its sockets forever.
            self._socket.close()
            self._context.term()

    def _take(self, id: bytes, kind: bytes, content: bytes) -> None:
        """Take a message of the server to the episode that it is about."""
        played = self._playing.get(id)
        if played is None:  # the answer to a request to cancel, or news of a cancelled episode
            return
        try:
            read = msgpack.unpackb(content, strict_map_key=False)
            if kind == b"delta":
                played.apply(read)
            elif not played.reply.done():
                played.reply.set_result(read)
        except UserError as error:
            played.fail(error)
        except Exception as error:
            logger.exception("the environment server sent what cannot be read")
            played.fail(EpisodeFailed(f"the environment server sent what cannot be read: {error!r}"))

    def fail(self, error: Exception) -> None:
        """Let all episodes in progress, and all later ones, fail with this error."""
        self._lost = error
        for played in self._playing.values():
            played.fail(error)

    def close(self) -> None:
        self._receiver.cancel()


def answers(address: str, seconds: float) -> bool:
    """Return True if the server at this address answers within this time."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        deadline = time.monotonic() + seconds
        socket.send_multipart([b"health", b"health", msgpack.packb({})])
        return bool(socket.poll(max(0, deadline - time.monotonic()) * 1000))


def _whole(reply: dict[str, Any], traces: dict[str, AgentTrace]) -> list[AgentTrace]:
    """Return the traces of an episode that was played to its end. Raises EpisodeFailed if it was not."""
    if not reply["success"]:
        raise EpisodeFailed(f"the environment server failed: {shortened(reply['error'], 2000)}")
    head = reply["head"]
    if not head["ok"]:
        errors = [
            *(head.get("errors") or []),
            *(error for trace in traces.values() for error in trace.errors),
        ]
        last = errors[-1] if errors else {"type": "episode", "message": "failed without an error"}
        raise EpisodeFailed(shortened(f"{last['type']}: {last['message']}", 2000))
    for one in reply["traces"]:
        trace = traces.get(one["id"])
        if trace is None or trace.counts != {"nodes": one["nodes"], "calls": one["calls"]}:
            raise EpisodeFailed(f"the environment server's account of trace {one['id']} is incomplete")
    return [traces[one["id"]] for one in reply["traces"]]
