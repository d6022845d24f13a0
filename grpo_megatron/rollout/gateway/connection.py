"""Connections of the gateway's clients: the body of a request, and whether the client still waits."""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import Receive

# Maximum bytes of a request's body, and maximum seconds until it has arrived.
MOST_BYTES = 64 << 20
MOST_SECONDS = 60.0


async def read_body(receive: Receive, most: int | None = None) -> bytes:
    """Read the body of a request.

    A body that is too long is read to its end all the same, but not kept: a client that still sends would
    not read the response.

    most: maximum number of bytes; None: MOST_BYTES.

    Raises HTTPException if the body is too long, if it takes longer than MOST_SECONDS, or if the client goes
    away.
    """
    most = MOST_BYTES if most is None else most
    parts, size = [], 0
    try:
        async with asyncio.timeout(MOST_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _gone()
                part = message.get("body", b"")
                size += len(part)
                if size <= most:
                    parts.append(part)
                else:
                    parts.clear()
                if not message.get("more_body"):
                    break
    except TimeoutError:
        raise HTTPException(408, f"the body of a request must arrive within {MOST_SECONDS:.0f} s") from None
    if size > most:
        raise HTTPException(413, f"the body of a request may have {most} bytes")
    return b"".join(parts)


async def while_connected(receive: Receive, answering: Awaitable[Any]) -> Any:
    """Wait for an answer, and return it. If the client goes away before, cancel the answer.

    receive: receives messages of the client, whose request has been read.

    Raises HTTPException if the client goes away, or if the answer is cancelled because the session ends.
    """
    task, gone = asyncio.ensure_future(answering), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _gone()
        if task.cancelled():
            raise HTTPException(410, "the session has ended")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await one


async def _disconnected(receive: Receive) -> None:
    """Wait until the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _gone() -> HTTPException:
    """Return the error for a client that has closed its connection. Only logs see it."""
    return HTTPException(499, "the client has closed its connection")
