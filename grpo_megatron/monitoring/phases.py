"""Time spent in each phase of the driver process, such as `generate` or `train`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Callback for a phase that has ended: name, start in seconds since the epoch, seconds.
Ended = Callable[[str, float, float], None]


class Phases:
    """Stopwatch for named phases of the driver process. `with phases("train"):` measures one phase.

    Time in a nested phase counts for the inner phase only.

    total: {phase: wall-clock seconds} since this object was created
    current: {phase: wall-clock seconds} since the last call of `take`
    """

    def __init__(
        self,
        begun: Callable[[str], None] = lambda name: None,
        ended: Ended = lambda name, start, seconds: None,
    ):
        """Create a stopwatch that has measured nothing yet.

        begun: called with the name when a phase begins, and when it goes on after a nested phase has ended
        ended: called with (name, start in seconds since the epoch, seconds) when a phase ends
        """
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
                if outer is not None:  # the outer phase will add its whole time when it ends
                    table[outer] = table.get(outer, 0.0) - elapsed
            self._ended(name, wall, elapsed)
            if outer is not None:
                self._begun(outer)

    def take(self) -> dict[str, float]:
        """Return {phase: seconds} since the last call of this method. The monitor calls it once per step."""
        taken, self.current = self.current, {}
        return taken
