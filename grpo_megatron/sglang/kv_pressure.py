"""The number of requests that an engine gets at a time, as far as the memory of its KV cache allows.

Requests that the KV cache has no room for would wait in the engine. They wait in the driver in their place,
because another engine may have room sooner.
"""

import asyncio
from collections import deque
from typing import NamedTuple


class EngineLoad(NamedTuple):
    """Requests in an engine, as of its last report.

    waiting: number of requests that wait for memory in the KV cache, on all ranks together
    time: when the engine reported this, in seconds since the epoch; 0 if it has not reported yet
    """

    waiting: int = 0
    time: float = 0.0


# Two observations of an engine count as successive if they are this many seconds apart.
_APART = (1.0, 10.0)


def next_limit(limit: int, most: int, in_flight: int, before: EngineLoad, now: EngineLoad) -> int:
    """Return how many requests an engine should have at a time from now on.

    - If requests waited at two successive observations, half as many may wait, because the KV cache is full.
      Requests that have just been sent wait at one observation only.
    - If none waits and the engine has as many requests as it may have, the limit grows by an eighth.
    - Otherwise, the limit stays as it is.

    The use of the KV cache does not decide: SGLang reserves memory for tokens that a request may still
    sample, so that requests wait while much of the cache is unused.

    limit: number of requests that the engine may have until now.
    most: largest limit (rollout.max_concurrency).
    in_flight: number of requests that have been sent to the engine and have not ended.
    before, now: the last two observations of the engine.
    """
    if now.waiting and before.waiting and now.time - before.time <= _APART[1]:
        return max(1, min(limit, in_flight - (now.waiting + 1) // 2))
    if not now.waiting and in_flight >= limit:
        return min(most, limit + max(1, limit // 8))
    return limit


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
