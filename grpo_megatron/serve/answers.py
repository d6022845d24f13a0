"""The answers of a server, which clients fetch by the id of their request."""

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
class FailedRequest:
    """The answer to a request that failed.

    message: what was wrong
    by_user: True if the request was wrong; False if the server failed
    """

    message: str
    by_user: bool = True


@dataclass(eq=False)
class RequestAnswer:
    """The answer to one request, which may still be pending."""

    id: str = ""
    """Id of the request."""
    digest: bytes = b""
    """Digest of the request, which tells a repeated request from another one with its id."""
    future: "Future[bytes | dict[str, Any] | FailedRequest]" = field(default_factory=Future)
    """Receives the result: bytes of a protobuf message, values for JSON, or FailedRequest."""
    waits_for: str = ""
    """Why the request has to wait, for the client's log. Empty: it waits for its turn only."""
    fetched: float | None = None
    """Time at which the answer was first fetched, by the clock of Answers."""

    def __post_init__(self):
        # A future that runs cannot be cancelled, for example by a client that goes away while it waits.
        self.future.set_running_or_notify_cancel()


class Unknown(Exception):
    """Nothing has the id that a request names."""


class Gone(Exception):
    """The thing that a request names has existed, but does not any more."""


class Answers:
    """All answers by the id of their request. A repeated request gets the answer of the first one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._answers: dict[str, RequestAnswer | None] = {}  # None: gone

    def open(self, request_id: str, request: bytes) -> tuple[RequestAnswer, bool]:
        """Return (the answer to a request, True if the request is new).

        request: the content of the request.

        Raises UserError if the id belongs to a request with another content, and Gone if the answer is gone.
        """
        digest = hashlib.blake2b(request).digest()
        if request_id not in self._answers:
            self._answers[request_id] = answer = RequestAnswer(request_id, digest)
            return answer, True
        answer = self.find(request_id)
        if answer.digest != digest:
            raise UserError(f"the id {request_id} belongs to another request; choose a new id")
        return answer, False

    def find(self, request_id: str) -> RequestAnswer:
        """Return the answer to a request. Raises Unknown if there was none, and Gone if it is not kept."""
        if request_id not in self._answers:
            raise Unknown(f"there was no request {request_id}")
        answer = self._answers[request_id]
        if answer is None:
            raise Gone(f"the answer to {request_id} was fetched before, and is not kept")
        return answer

    def mark_fetched(self, answer: RequestAnswer) -> None:
        answer.fetched = answer.fetched or self._clock()

    def forget_old(self) -> None:
        """Drop the answers that were fetched more than five minutes ago."""
        limit = self._clock() - _KEPT_SECONDS
        for one in list(self._answers.values()):
            if one and one.fetched and one.fetched < limit:
                self._answers[one.id] = None
