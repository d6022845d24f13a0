"""EngineLoads: chooses the engine for each group."""

import heapq
from collections import Counter
from collections.abc import Mapping


class EngineLoads:
    """Counts the groups that each engine has in progress, and finds the engine with the fewest.

    A heap finds this engine. Comparing a thousand engines for each new group would take longer than all other
    work of the driver for the group.
    """

    def __init__(self) -> None:
        self._loads: Counter[int] = Counter()
        self._heap: list[tuple[int, int]] = []  # (number of groups, index of the engine)
        self._engines: Mapping[int, int] = {}  # those that the heap has
        self._size = 0

    def least(self, engines: Mapping[int, int]) -> int:
        """Return the index of the engine with the fewest groups in progress. In a tie, the lowest index wins.

        engines: {index: number of starts} of the engines to choose from; at least one. Only the indices are
            used. If engines have been added since the last call, the argument must be another object or
            have another length, because other changes are not noticed.
        """
        too_large = len(self._heap) > 4 * len(engines) + 64
        if too_large or engines is not self._engines or len(engines) != self._size:
            self._engines, self._size = engines, len(engines)
            self._heap = [(self._loads[index], index) for index in engines]
            heapq.heapify(self._heap)
        while True:
            load, index = self._heap[0]
            if load == self._loads[index] and index in engines:
                return index
            heapq.heappop(self._heap)

    def add(self, engine: int, groups: int) -> None:
        """Add `groups` to the number of groups that an engine has in progress. `groups` may be negative.

        engine: index of the engine.
        """
        self._loads[engine] += groups
        heapq.heappush(self._heap, (self._loads[engine], engine))
