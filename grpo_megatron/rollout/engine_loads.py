"""EngineLoads: the work that each engine has, and the choice of the engine for a group."""

import heapq
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple


class GroupWork(NamedTuple):
    """The work that an engine still has with a group.

    samples: number of samples for which the engine has a request, or soon gets one
    tokens: maximum number of tokens that the engine reads and samples for them
    """

    samples: int
    tokens: int


class WorkReport(NamedTuple):
    """The report of a rollout worker on a group that is not finished.

    work: the work that the engine has left with the group
    limit: number of requests that the group's engine should have at a time, as its KV cache allows; 0 if this
        is not known
    """

    work: GroupWork
    limit: int


# An engine is given an eighth more samples than it takes at a time. Otherwise a slot of the engine would be
# empty from the end of a sample until the driver has heard of it and has sent another group.
_AHEAD = 8


class EngineLoads:
    """Tracks the work that each engine has left, and chooses the engine for the next group.

    A heap finds this engine. Comparing a thousand engines for each new group would take longer than all other
    work of the driver for the group.
    """

    def __init__(self, limit: int, limits: dict[int, int] | None = None):
        """Begin with engines that have no work.

        limit: number of samples that an engine takes at a time (rollout.max_concurrency), until a WorkReport
            says otherwise.
        limits: {engine: WorkReport.limit of the last report}, which reports change. Several objects may share
            it. None: no reports have come yet.
        """
        self._limit = limit
        self._limits = {} if limits is None else limits
        self._groups: dict[int, tuple[int, GroupWork]] = {}  # {key: (engine, work)}
        self._samples: defaultdict[int, int] = defaultdict(int)  # of each engine
        self._tokens: defaultdict[int, int] = defaultdict(int)  # of each engine
        self._heap: list[tuple[int, int]] = []  # (outstanding tokens, index of the engine)
        self._engines: Mapping[int, int] = {}  # those that the heap has
        self._size = 0

    def best(self, engines: Mapping[int, int]) -> int | None:
        """Return the engine with the fewest outstanding tokens among those with room, or None without one.

        In a tie, the lowest index wins.

        engines: {index: number of starts} of the engines to choose from. If the set of engines changes, the
            argument must be another object or have another length.
        """
        too_large = len(self._heap) > 4 * len(engines) + 64
        if too_large or engines is not self._engines or len(engines) != self._size:
            self._engines, self._size = engines, len(engines)
            self._heap = [(self._tokens[index], index) for index in engines]
            heapq.heapify(self._heap)
        while self._heap:
            tokens, index = self._heap[0]
            if tokens == self._tokens[index] and index in engines and self._has_room(index):
                return index
            heapq.heappop(self._heap)  # _changed adds it again
        return None

    def least(self, engines: Mapping[int, int]) -> int:
        """Return the engine with the fewest outstanding tokens, whether it has room or not.

        engines: {index: number of starts} of the engines to choose from; at least one.
        """
        return min(engines, key=lambda index: (self._tokens[index], index))

    def _has_room(self, engine: int) -> bool:
        limit = self._limits.get(engine, self._limit)
        return self._samples[engine] < limit + max(1, limit // _AHEAD)

    def start(self, engine: int, key: int, work: GroupWork) -> None:
        """Note that an engine has got a group. key: number of the group's request."""
        self._groups[key] = engine, work
        self._changed(engine, work.samples, work.tokens)

    def report(self, key: int, report: WorkReport) -> None:
        """Note what is left of a group, and the limit of its engine. A report after `end` is ignored."""
        if key not in self._groups:
            return
        engine, before = self._groups[key]
        self._groups[key] = engine, report.work
        if report.limit:
            self._limits[engine] = report.limit
        self._changed(engine, report.work.samples - before.samples, report.work.tokens - before.tokens)

    def end(self, key: int) -> None:
        """Note that a group is finished, or has left its engine."""
        engine, work = self._groups.pop(key)
        self._changed(engine, -work.samples, -work.tokens)

    def _changed(self, engine: int, samples: int, tokens: int) -> None:
        self._samples[engine] += samples
        self._tokens[engine] += tokens
        if engine in self._engines:
            heapq.heappush(self._heap, (self._tokens[engine], engine))
