"""The number of requests that an engine gets at a time, as far as the memory of its KV cache allows.

Requests that the KV cache has no room for would wait in the engine. They wait in the driver in their place,
because another engine may have room sooner.
"""

import asyncio
import math
from collections import deque
from typing import NamedTuple


class EngineLoad(NamedTuple):
    """Requests of all clients in an engine, as of its last report.

    running: number of requests that the engine works on
    waiting: number of requests that wait for memory in the KV cache
    time: when the engine reported this, in seconds since the epoch; 0 if it has not reported yet
    """

    running: int = 0
    waiting: int = 0
    time: float = 0.0


# Two observations of an engine count as successive if they are this many seconds apart.
_APART = (1.0, 10.0)


def next_limit(limit: int, most: int, in_flight: int, before: EngineLoad, now: EngineLoad) -> int:
    """Return how many requests a client may have at an engine from now on.

    - If requests waited at two successive observations, the KV cache is full. The client then takes back half
      of its share of the waiting requests. Requests that have just been sent wait at one observation only.
    - If none waits, the limit grows by an eighth, and by at least 4.
    - Otherwise, the limit stays as it is.

    The use of the KV cache does not decide: SGLang reserves memory for tokens that a request may still
    sample, so that requests wait while much of the cache is unused.

    limit: number of requests that the client may have until now.
    most: largest limit (rollout.max_concurrency).
    in_flight: number of requests that the client has sent and that have not ended.
    before, now: the last two observations of the engine.
    """
    if not now.waiting:
        return min(most, limit + max(4, limit // 8))
    if not before.waiting or now.time - before.time > _APART[1]:
        return limit
    share = in_flight / max(in_flight, now.running + now.waiting)
    return max(1, min(limit, in_flight - math.ceil(share * now.waiting / 2)))


class RequestLimit:
    """A semaphore whose limit can change. Within `async with`, a request is in flight.

    most: largest limit
    limit: current limit
    in_flight: number of requests in flight. It may be above a limit that was lowered.
    """

    def __init__(self, most: int, limit: int | None = None):
        """Begin without requests. limit: the first limit; None: `most`."""
        self.most, self.limit = most, limit or most
        self.in_flight = 0
        self._waiting: deque[asyncio.Future] = deque()
        self._before = EngineLoad()

    def observe(self, load: EngineLoad) -> None:
        """Set the limit that follows from an observation of the engine and the one before it.

        Nothing happens if the engine reported the observation less than a second after the last one.
        """
        if load.time - self._before.time < _APART[0]:
            return
        self.limit = next_limit(self.limit, self.most, self.in_flight, self._before, load)
        self._before = load
        self._grant()

    async def __aenter__(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn had come, and is now the next one's
                await self.__aexit__()
            raise

    async def __aexit__(self, *_) -> None:
        self.in_flight -= 1
        self._grant()

    def _grant(self) -> None:
        """Give turns to the requests that have waited longest, as far as the limit allows."""
        while self._waiting and self.in_flight < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():  # otherwise its request was cancelled
                turn.set_result(None)
                self.in_flight += 1
