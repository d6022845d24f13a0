"""Clients: the sessions of clients, and which of them has the model."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from grpo_megatron.serve.answers import FailedRequest, Gone, RequestAnswer
from grpo_megatron.serve.tenant import ServerJob, Tenant

logger = logging.getLogger(__name__)

# Seconds for which a client may give no sign of life after it has announced its end. The SDK sends a sign
# every ten seconds.
_LAST_SECONDS = 15.0


@dataclass
class _Owner:
    """The client that has the model.

    session, model: ids of the client's session and of its model
    following: number of the request whose turn is next
    early: {number: request} of those that arrived before one with a smaller number
    """

    session: str
    model: str
    following: int = 1
    early: dict[int, ServerJob] = field(default_factory=dict)


class Clients:
    """Sessions of clients. One of them at a time has the model; others wait until it ends or is lost.

    All methods must be called in the server's event loop.
    """

    def __init__(self, tenant: Tenant, lost_after: float, clock: Callable[[], float] = time.monotonic):
        """Begin without clients.

        lost_after: seconds without a sign of life after which a client counts as lost.
        """
        self._tenant, self._lost_after, self._clock = tenant, lost_after, clock
        self._seen: dict[str, float] = {}
        self._keys: dict[str, str] = {}
        self._owner: _Owner | None = None
        self._waiting: deque[tuple[str, str, ServerJob]] = deque()

    def open(self, key: str | None) -> str:
        """Return the id of a new session. If the key is that of an earlier call, return the same session."""
        session = self._keys.get(key or "") or secrets.token_hex(8)
        if key:
            self._keys[key] = session
        self._seen[session] = self._clock()
        return session

    def is_alive(self, session: str) -> bool:
        """Note a sign of life of a client. Return False if its session is unknown or has ended."""
        if session in self._seen:
            self._seen[session] = self._clock()
        return session in self._seen

    def may_end(self, session: str) -> None:
        """Note that a client has announced its end. The SDK does so at its exit, but also after errors."""
        if session in self._seen:
            self._seen[session] = min(self._clock() - self._lost_after + _LAST_SECONDS, self._clock())

    def must_have(self, model: str) -> _Owner:
        """Return the client that has a model. Raises Gone if none has it now."""
        if self._owner is None or self._owner.model != model:
            raise Gone(f"the client of the model {model!r} has ended or was lost; load a state that it saved")
        self.is_alive(self._owner.session)
        return self._owner

    def put(self, model: str, number: int, job: ServerJob) -> None:
        """Submit a job when all with smaller numbers have been. A number that has had its turn fails."""
        owner = self.must_have(model)
        if number < owner.following:
            return job.finish(FailedRequest(f"request {number} is late; the next one is {owner.following}"))
        owner.early[number] = job
        while owner.following in owner.early:
            self._tenant.submit(owner.early.pop(owner.following))
            owner.following += 1

    def admit(self, session: str, model: str, job: ServerJob) -> None:
        """Give the model to a client as soon as no other has it, and submit the client's first job."""
        if not self.is_alive(session):
            job.finish(FailedRequest(f"the session {session} has ended"))
        elif self._owner and self._owner.session == session:
            job.finish(FailedRequest("the client has the model already, and the server has only one"))
        elif self._owner:
            job.answer.waits_for = "another client uses the model"
            self._waiting.append((session, model, job))
        else:
            self._give(session, model, job)

    def _give(self, session: str, model: str, job: ServerJob) -> None:
        job.answer.waits_for = ""
        self._owner = owner = _Owner(session, model)
        logger.info(f"client {session} has the model")
        loop = asyncio.get_running_loop()
        job.answer.future.add_done_callback(
            lambda done: loop.call_soon_threadsafe(self._began, owner, done.result())
        )
        self._tenant.submit(job)

    def _began(self, owner: _Owner, result: object) -> None:
        """Take the model back from a client whose first request has failed."""
        if isinstance(result, FailedRequest) and self._owner is owner:
            self._free(result.message)

    def _free(self, reason: str) -> None:
        """Take the model from its client. It returns to its last saved state, and the next client gets it."""
        logger.info(f"client {self._owner.session} loses the model: {reason}")
        for job in self._owner.early.values():
            job.finish(FailedRequest(reason))
        self._owner = None
        self._tenant.submit(ServerJob(RequestAnswer(), self._tenant.restore))
        if self._waiting:
            self._give(*self._waiting.popleft())

    def end(self, session: str, reason: str) -> None:
        """End the session of a client."""
        if self._seen.pop(session, None) is None:
            return
        for waiting in [one for one in self._waiting if one[0] == session]:
            self._waiting.remove(waiting)
            waiting[2].finish(FailedRequest(reason))
        if self._owner and self._owner.session == session:
            self._free(reason)

    def end_lost(self) -> None:
        """End the sessions of clients that have given no sign of life for too long."""
        limit = self._clock() - self._lost_after
        for session in [session for session, seen in self._seen.items() if seen < limit]:
            self.end(session, f"no sign of life for {self._lost_after:g} s")
