"""The answers of a server, which clients ask for by the id of their request, and the order of requests."""

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.errors import UserError

# Seconds for which an answer stays after it was first fetched, for a client whose connection broke.
_KEPT_SECONDS = 300.0


@dataclass(frozen=True)
class Failed:
    """The answer to a request that failed.

    message: what was wrong
    by_user: True if the request was wrong; False if the server failed
    """

    message: str
    by_user: bool = True


@dataclass(eq=False)
class Answer:
    """The answer to one request, which may still be pending."""

    id: str
    """Id of the request."""
    digest: bytes
    """Digest of the request's body, so that a repeated request is told from another one with its id."""
    future: "Future[bytes | dict[str, Any] | Failed]" = field(default_factory=Future)
    """Receives the result: bytes of a protobuf message, values for JSON, or Failed."""
    waits_for: str = ""
    """Why the request has to wait, for the client's log. Empty: it waits for its turn only."""
    fetched: float | None = None
    """Time at which the answer was first fetched, by the clock of Answers."""

    def finish(self, result: bytes | dict[str, Any] | Failed) -> None:
        """Set the result, unless there is one. Any thread may call this."""
        if not self.future.done():
            self.future.set_result(result)


class Gone(Exception):
    """The answer was fetched some time ago and is not kept any more."""


class Answers:
    """All answers by the id of their request. A repeated request gets the answer of the first one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._answers: dict[str, Answer] = {}
        self._forgotten: set[str] = set()

    def open(self, request_id: str, body: bytes) -> tuple[Answer, bool]:
        """Return (the answer to a request, True if the request is new).

        body: the request's body.

        Raises UserError if the id belongs to a request with another body, and Gone if the answer is gone.
        """
        if request_id in self._forgotten:
            raise Gone(request_id)
        digest = hashlib.blake2b(body).digest()
        known = self._answers.get(request_id)
        if known is None:
            self._answers[request_id] = answer = Answer(request_id, digest)
            return answer, True
        if known.digest != digest:
            raise UserError(f"the request {request_id} was made before, with another content")
        return known, False

    def find(self, request_id: str) -> Answer | None:
        """Return the answer to a request, or None if there was no such request. Raises Gone if it is gone."""
        if request_id in self._forgotten:
            raise Gone(request_id)
        return self._answers.get(request_id)

    def mark_fetched(self, answer: Answer) -> None:
        answer.fetched = answer.fetched or self._clock()

    def forget_old(self) -> None:
        """Drop the answers that were fetched more than five minutes ago."""
        limit = self._clock() - _KEPT_SECONDS
        old = [one.id for one in self._answers.values() if one.fetched and one.fetched < limit]
        for request_id in old:
            del self._answers[request_id]
            self._forgotten.add(request_id)


class Line:
    """Puts numbered requests in order: one that arrives early waits until all before it have arrived."""

    def __init__(self, first: int):
        """Create an empty line.

        first: number of the first request.
        """
        self._next = first
        self._early: dict[int, Any] = {}

    def put(self, number: int, item: Any) -> list[Any]:
        """Add a request. Return the requests whose turn has come, in order.

        Raises UserError if the number has had its turn.
        """
        if number < self._next:
            raise UserError(f"the request number {number} has had its turn; the next one is {self._next}")
        self._early[number] = item
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready

    def rest(self) -> list[Any]:
        """Remove and return the requests that still wait."""
        rest = list(self._early.values())
        self._early.clear()
        return rest
