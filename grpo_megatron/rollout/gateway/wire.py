"""WireRequest: the body of a request in one of the gateway's protocols, and the forms of its answer."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from grpo_megatron.errors import UserError
from grpo_megatron.rollout.gateway.session import AgentSession


class WireRequest(BaseModel, ABC):
    """Body of a request in one of the gateway's protocols. Unknown fields are part of what is asked."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = False

    form_fields: ClassVar[set[str]] = {"stream"}
    """Fields that change only the form of the answer."""

    @property
    def key(self) -> str:
        """Text that is equal for two requests that ask for the same, whatever the form of the answer."""
        asked = self.model_dump_json(exclude=self.form_fields, exclude_none=True)
        return f"{type(self).__name__} {hashlib.sha256(asked.encode()).hexdigest()}"

    @abstractmethod
    def check(self, session: AgentSession) -> None:
        """Raise UserError if the request asks for something that the session cannot do."""

    @abstractmethod
    async def answer(self, session: AgentSession, key: str) -> Any:
        """Return the session's answer. Raises UserError and the session's errors.

        key: identifies the request. A client that retries a request sends the same key.
        """

    @abstractmethod
    def body(self, answer: Any, model: str) -> dict[str, Any]:
        """Return an answer as the body of a JSON response.

        answer: what `answer` has returned.
        model: name of the model, if the request does not name one.
        """

    @abstractmethod
    def events(self, body: dict[str, Any]) -> Iterator[str]:
        """Yield the body of a response as server-sent events, for a client that asked for a stream."""

    @staticmethod
    @abstractmethod
    def error(status: int, message: str, code: str | None) -> dict[str, Any]:
        """Return an error as the body of a JSON response.

        status: status of the response.
        code: machine-readable name of the error; None if it has none.
        """


def server_sent(data: str, event: str | None = None) -> str:
    """Return a server-sent event with this text, which must be a single line."""
    return (f"event: {event}\n" if event else "") + f"data: {data}\n\n"


def check_number(n: int | None) -> None:
    """Raise UserError if a request wants several answers."""
    if n not in (None, 1):
        raise UserError(
            f"n={n}: a request gets one answer; send {n} requests, each with another header Idempotency-Key"
        )


def check_stops(name: str, stops: Sequence[str], session: AgentSession) -> None:
    """Raise UserError if a request names stop strings at which the run does not end turns.

    name: name of the request's field.
    """
    if not set(stops) <= set(session.stops):
        raise UserError(
            f"{name}: the run decides what ends a turn; add {list(stops)} to rollout.stop in its "
            "configuration, or leave it out of the request"
        )
