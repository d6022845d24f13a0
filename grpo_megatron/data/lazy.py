"""Sequences whose items are made when they are asked for."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")


class Made(Sequence[T]):
    """What `make` makes of some numbers, such as places of records; kept are the numbers alone."""

    def __init__(self, numbers: Sequence[int], make: Callable[[int], T]):
        self._numbers, self._make = numbers, make

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> T:
        return self._make(self._numbers[index])


class Chain(Sequence[T]):
    """Sequences one behind the other."""

    def __init__(self, parts: Sequence[Sequence[T]]):
        self._parts = parts
        self._starts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> T:
        index = range(len(self))[index]
        part = bisect_right(self._starts, index) - 1
        return self._parts[part][index - self._starts[part]]
