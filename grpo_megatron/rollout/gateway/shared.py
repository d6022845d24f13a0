"""Sessions that one client serves under one key: it names the session of each request in a header."""

import asyncio
import secrets

from starlette.types import ASGIApp, Receive, Scope, Send

# Header that names the session. verifiers' environment server sends it.
_NAME_HEADER = b"x-session-id"
# The client may make the first request of a session before it has told the session's name.
_WAIT_SECONDS = 10.0


class SharedSessions:
    """Sessions by the names that a trusted client has given to them.

    key: the client's key. It opens nothing but sessions that have a name
    """

    def __init__(self):
        self.key = secrets.token_urlsafe(32)
        self._named: dict[str, asyncio.Future[str]] = {}

    def name(self, name: str, key: str) -> None:
        """Let requests with this name go to the session with this key."""
        future = self._future(name)
        if not future.done():
            future.set_result(key)

    def forget(self, key: str) -> None:
        """Remove all names of the session with this key."""
        self._named = {
            name: one for name, one in self._named.items() if not one.done() or one.result() != key
        }

    def before(self, app: ASGIApp) -> ASGIApp:
        """Return an application that gives the client's requests the key of their session.

        app: the application that gets all requests then.
        """

        async def with_key(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                scope = scope | {"headers": await self._headers(scope["headers"])}
            await app(scope, receive, send)

        return with_key

    async def _headers(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        given = dict(headers)
        scheme, _, bearer = given.get(b"authorization", b"").partition(b" ")
        key = bearer if scheme.lower() == b"bearer" else given.get(b"x-api-key", b"")
        if _NAME_HEADER not in given or not secrets.compare_digest(key, self.key.encode()):
            return headers
        own = await self._find(given[_NAME_HEADER].decode("latin-1"))
        others = [pair for pair in headers if pair[0] not in (b"authorization", b"x-api-key")]
        return [*others, (b"authorization", f"Bearer {own}".encode())] if own else others

    async def _find(self, name: str) -> str | None:
        """Return the key of the session with this name, or None if it gets no name in time."""
        future = self._future(name)
        await asyncio.wait([future], timeout=_WAIT_SECONDS)
        if future.done():
            return future.result()
        if self._named.get(name) is future:
            del self._named[name]
        return None

    def _future(self, name: str) -> "asyncio.Future[str]":
        return self._named.setdefault(name, asyncio.get_running_loop().create_future())
