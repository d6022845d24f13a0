"""Sessions that one client serves under one key: it names the session of each request in a header."""

import asyncio
import secrets

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

    async def find(self, name: str) -> str | None:
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
