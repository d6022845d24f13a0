"""The number of requests that an engine gets at a time, as far as the memory of its KV cache allows.

Requests that the KV cache has no room for would wait in the engine. They wait in the driver in their place,
because another engine may have room sooner.
"""

import asyncio
import math
from collections import deque
from typing import NamedTuple


class EngineLoad(NamedTuple):
    """Numbers of requests in an engine. With data-parallel attention, they are sums over all groups of ranks.

    running: number of requests that the engine works on
    waiting: number of requests that wait for memory in the KV cache, or for their turn to be read
    """

    running: int
    waiting: int


def next_limit(limit: int, most: int, in_flight: int, before: EngineLoad, now: EngineLoad) -> int:
    """Return how many requests an engine should have at a time from now on.

    - If requests waited at both observations, half as many may wait, because the KV cache is full. Requests
      that have just been sent wait at one observation only.
    - If none waits and the engine has as many requests as it may have, the limit grows by an eighth.
    - Otherwise, the limit stays as it is.

    The use of the KV cache does not decide: SGLang reserves memory for tokens that a request may still
    sample, so that requests wait while much of the cache is unused.

    limit: number of requests that the engine may have until now.
    most: largest limit (rollout.max_concurrency).
    in_flight: number of requests that have been sent to the engine and have not ended.
    before, now: two successive observations of the engine.
    """
    if before.waiting and now.waiting:
        return max(1, min(limit, now.running + now.waiting // 2))
    if not now.waiting and in_flight >= limit:
        return min(most, limit + max(1, limit // 8))
    return limit


# Minimum seconds between two observations that count. An engine reports its load about once a second.
_INTERVAL = 1.0


class RequestLimit:
    """A semaphore whose limit can change. Within `async with`, a request is in flight.

    most: largest limit
    limit: current limit, at first `most`
    in_flight: number of requests in flight. It may be above a limit that was lowered.
    """

    def __init__(self, most: int):
        self.most = self.limit = most
        self.in_flight = 0
        self._waiting: deque[asyncio.Future] = deque()
        self._before, self._observed = EngineLoad(0, 0), -math.inf

    def observe(self, load: EngineLoad, now: float) -> None:
        """Set the limit that follows from an observation of the engine and the one before it.

        Nothing happens if the last observation that counted was less than a second ago.

        now: time in seconds.
        """
        if now - self._observed < _INTERVAL:
            return
        self.limit = next_limit(self.limit, self.most, self.in_flight, self._before, load)
        self._before, self._observed = load, now
        self._wake()

    async def __aenter__(self) -> None:
        while self.in_flight >= self.limit:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._wake()  # the turn may have come already, and is now the next one's
                raise
        self.in_flight += 1

    async def __aexit__(self, *_) -> None:
        self.in_flight -= 1
        self._wake()

    def _wake(self) -> None:
        free = self.limit - self.in_flight
        while self._waiting and free > 0:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                free -= 1
