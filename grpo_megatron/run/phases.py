"""Where the time of a step goes."""

import time
from contextlib import contextmanager


class Phases:
    """Wall-clock seconds per named phase; phases do not nest."""

    def __init__(self):
        self.total: dict[str, float] = {}
        self.current: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str):
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            for table in (self.total, self.current):
                table[name] = table.get(name, 0.0) + elapsed

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call."""
        taken, self.current = self.current, {}
        return taken
