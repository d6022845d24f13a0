"""Where the time of the driver goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# (name, beginning in seconds since the epoch, seconds) of a phase that has ended.
Ended = Callable[[str, float, float], None]


class Phases:
    """Wall-clock seconds per named phase; phases do not nest.

    total: of the whole run. current: since the last `take`.
    """

    def __init__(self, begun: Callable[[str], None] = lambda name: None, ended: Ended = lambda name, start, seconds: None):
        """begun, ended: are told of every phase."""
        self.total: dict[str, float] = {}
        self.current: dict[str, float] = {}
        self._begun, self._ended = begun, ended

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._begun(name)
        wall, start = time.time(), time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            for table in (self.total, self.current):
                table[name] = table.get(name, 0.0) + elapsed
            self._ended(name, wall, elapsed)

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call."""
        taken, self.current = self.current, {}
        return taken
