"""Where the time of the driver goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# (name, beginning in seconds since the epoch, seconds) of a phase that has ended.
Ended = Callable[[str, float, float], None]


class Phases:
    """Wall-clock seconds per named phase; what passes in a phase within another is of the inner one alone, so that no second counts twice.

    total: of the whole run. current: since the last `take`.
    """

    def __init__(
        self,
        begun: Callable[[str], None] = lambda name: None,
        ended: Ended = lambda name, start, seconds: None,
    ):
        """begun, ended: are told of every phase; begun also when one goes on because a phase within it has ended."""
        self.total: dict[str, float] = {}
        self.current: dict[str, float] = {}
        self._begun, self._ended = begun, ended
        self._open: str | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        outer, self._open = self._open, name
        self._begun(name)
        wall, start = time.time(), time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self._open = outer
            for table in (self.total, self.current):
                table[name] = table.get(name, 0.0) + elapsed
                if outer is not None:  # it gets back at its end what is taken from it here
                    table[outer] = table.get(outer, 0.0) - elapsed
            self._ended(name, wall, elapsed)
            if outer is not None:
                self._begun(outer)

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call."""
        taken, self.current = self.current, {}
        return taken
